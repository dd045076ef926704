"""Step 1, moments: layers that multiply by a matrix: Linear, and the transposed one of `transformers`."""

from __future__ import annotations

from torch import Tensor, nn

from gradwire.moments.registry import Uses, register
from gradwire.moments.site import Site
from gradwire.moments.uses import Direct, Positions, exact_dtype


def wide(tensor: Tensor) -> Tensor:
    """Half precision is summed in float32."""
    return tensor.to(exact_dtype(tensor))


@register(nn.Linear, casts=True)
def linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight: c_b = G_b^T X_b; bias: c_b = sum_t G_bt. G [B, T, O], X [B, T, I]."""
    if "weight" in site.wanted:
        yield "weight", Positions(site.positions(gradient), site.positions(saved[0]))
    if "bias" in site.wanted:
        yield "bias", Direct(site.sums(wide(gradient), features=1))


@register("transformers.pytorch_utils.Conv1D", casts=True)
def transposed_linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight [I, O]: c_b = X_b^T G_b; bias as in linear."""
    if "weight" in site.wanted:
        yield "weight", Positions(site.positions(saved[0]), site.positions(gradient))
    if "bias" in site.wanted:
        yield "bias", Direct(site.sums(wide(gradient), features=1))

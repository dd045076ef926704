"""Step 1, moments: layers that multiply by a matrix: Linear, and the transposed one of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments.instead import instead
from gradwire.moments.registry import Uses, register
from gradwire.moments.site import Site
from gradwire.moments.sums import position_sums
from gradwire.moments.tap import Tap, plain_forward
from gradwire.moments.together import LINEARS, Problem, choose, exact_dtype
from gradwire.moments.uses import Direct, Positions


def wide(tensor: Tensor) -> Tensor:
    """Half precision is summed in float32."""
    return tensor.to(exact_dtype(tensor))


@dataclass(frozen=True)
class Multiply:
    """x W^T + bias; turned: the weight lies as [I, O]."""

    names: tuple[str, str] = ("weight", "bias")
    turned: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.turned or bias is None:
            return F.linear(x, weight.T if self.turned else weight, bias)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (rows @ (weight.T if self.turned else weight)).view(x.shape)

    def serves(self, x: Tensor, weight: Tensor, axis: int, samples: int) -> bool:
        """T = 1: the moment is one more GEMM and can wait, but its bias and its check are cheaper here."""
        if x.ndim < 2 or axis > x.ndim - 2:
            return False
        positions = x.numel() // max(1, samples * x.shape[-1])
        problem = Problem(x.device, x.dtype, samples, positions, weight.shape)
        return positions == 1 or choose(LINEARS, problem) is not None


def linear_forward(module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    output = instead(module, tap, args[0], "", PLAIN) if len(args) == 1 and not kwargs else None
    return plain_forward(module, tap, *args, **kwargs) if output is None else output


def turned_forward(module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    output = instead(module, tap, args[0], "", TURNED) if len(args) == 1 and not kwargs else None
    return plain_forward(module, tap, *args, **kwargs) if output is None else output


PLAIN, TURNED = Multiply(), Multiply(turned=True)


@register(nn.Linear, forward=linear_forward, casts=True)
def linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight: c_b = G_b^T X_b; bias: c_b = sum_t G_bt. G [B, T, O], X [B, T, I]."""
    if "weight" in site.wanted:
        yield "weight", Positions(site.positions(gradient), site.positions(saved[0]))
    if "bias" in site.wanted:
        moved = site.samples_first(gradient, features=1)
        yield "bias", Direct(position_sums(moved, range(1, moved.ndim - 1)))


@register("transformers.pytorch_utils.Conv1D", forward=turned_forward, casts=True)
def transposed_linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight [I, O]: c_b = X_b^T G_b; bias as in linear."""
    if "weight" in site.wanted:
        yield "weight", Positions(site.positions(saved[0]), site.positions(gradient))
    if "bias" in site.wanted:
        moved = site.samples_first(gradient, features=1)
        yield "bias", Direct(position_sums(moved, range(1, moved.ndim - 1)))

"""Random elements of each tensor, the same ones on every rank, with memory (Stich et al., arXiv:1809.07599)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.arithmetic.finite import sifted
from gradwire.arithmetic.shuffle import chosen
from gradwire.codec.quota import Quota, check_density, table_of
from gradwire.methods.base import Context, Outcome, Rounds
from gradwire.methods.residual import Residual, WithResidual


@dataclass(frozen=True)
class RandomK(WithResidual, Rounds):
    """Sums k = max(1, floor(density n)) elements of every tensor over the ranks: r += g, sent r[places], r[places] = 0.

    The places are drawn from (seed, step, name), so that all ranks know them and none is sent.

    density: the share of the elements that is sent; seed: another one draws other places.
    """

    density: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_density("RandomK", self.density)

    @property
    def share(self) -> float:
        return self.density

    def rounds(self, grad: Tensor, state: Residual, context: Context) -> Generator[Tensor, Tensor, Outcome]:
        quota = Quota.of(context.layout, self.density)
        good, finite = sifted(context.only(grad))
        state.residual += good
        places, tensor = chosen(self.seed, context.step, quota, grad.device)
        values, counts = state.residual[places], table_of(quota, grad.device).counts
        if context.active is not None:
            values, counts = torch.where(context.active[tensor], values, 0.0), counts * context.active
        state.residual.index_add_(0, places, values, alpha=-1)
        # wherever the bad value is, every rank must know
        total = yield torch.where(finite, values * (1 / context.world_size), torch.nan)
        mean = torch.zeros_like(grad).index_copy_(0, places, total)

        def undo() -> None:
            state.residual.index_add_(0, places, values)

        return Outcome(mean, torch.isfinite(total).all(), undo, counts, values.abs().sum())

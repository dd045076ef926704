"""Stochastic rounding to a sign or nothing, a scale a tensor: TernGrad (Wen et al., arXiv:1705.07878)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.arithmetic.groups import groups_of, largest, sums
from gradwire.codec import numba_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context, Nothing
from gradwire.methods.fixed import Body, Fixed, rank_by_rank
from gradwire.methods.qsgd.definition import LARGEST, unsound

EACH = 5  # trits in a byte: 3^5 = 243
PLACES = (1, 3, 9, 27, 81)
TOP = 242


@dataclass(frozen=True)
class TernGrad(Fixed):
    """Sends s * sign(g) * b with P(b = 1) = |g| / s, else b = 0, for s the largest |g| of the tensor: its mean is g.

    clip: first |g| is cut to `clip` standard deviations of the tensor, which makes s smaller and the mean of what is
        sent the gradient after the cut; None: no cut, unbiased. A tensor whose elements are all the same has no
        deviation and is not cut.
    seed: of the draws, which are other ones on every rank.

    The body: s of every tensor as float32, then a byte for five elements: 0 nothing, 1 plus, 2 minus, to the base 3.
    """

    clip: float | None = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"TernGrad: clip must be > 0 standard deviations, or None for no clipping, got {self.clip}"
            )

    def body_words(self, layout: Layout) -> int:
        return len(layout) + _n_words(layout)

    def write(self, grad: Tensor, state: Nothing, context: Context) -> Body:
        layout = context.layout
        if numba_ready(grad.device):
            from gradwire.methods.terngrad import cpu as compiled_terngrad

            keys = draws.keys(self.seed, context.step, layout, context.rank)
            return Body(*compiled_terngrad.write(grad, layout, keys, self.clip, _n_words(layout)))
        scales = self.scales(grad, layout)
        scale = layout.spread(scales)
        chance = draws.uniform(self.seed, context.step, layout, grad.device, context.rank)
        sent = (scale > 0) & (chance < torch.minimum(grad.abs(), scale) / scale)
        trits = torch.zeros(_n_words(layout) * 4 * EACH, dtype=torch.uint8, device=grad.device)
        trits[: layout.numel] = sent.byte() + (sent & (grad < 0)).byte()
        columns = trits.view(-1, EACH)
        packed = columns[:, 0].clone()
        for number, place in enumerate(PLACES[1:], 1):
            packed += columns[:, number] * place
        return Body(torch.cat([scales.view(torch.int32), packed.view(torch.int32)]), (sent * scale).sum())

    def scales(self, grad: Tensor, layout: Layout) -> Tensor:
        """s, float32 [K]."""
        tops = largest(grad, groups_of(layout, None))
        if self.clip is None:
            return tops
        return clipped(tops, deviations(grad, layout), self.clip)

    def read(self, bodies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        n_scales = len(context.layout)
        scales, packed = bodies[:, :n_scales].view(torch.float32), bodies[:, n_scales:].view(torch.uint8)
        return bodies, unsound(scales) | (packed > TOP).any(1)

    def add(self, body: Tensor, out: Tensor, weight: float, context: Context) -> None:
        layout = context.layout
        scales, packed = body[: len(layout)].view(torch.float32), body[len(layout) :].view(torch.uint8)
        places = torch.tensor(PLACES, dtype=torch.uint8, device=out.device)
        trits = (packed[:, None] // places % 3).flatten()[: layout.numel]
        value = torch.where(trits == 0, 0.0, layout.spread(scales * weight))
        out += torch.where(trits == 2, -value, value)

    def add_all(self, said: Tensor, out: Tensor, context: Context) -> None:
        """On a CPU tile by tile, all ranks."""
        if not numba_ready(out.device):
            rank_by_rank(self.add, said, out, context)
            return
        from gradwire.methods.terngrad import cpu as compiled_terngrad

        n_scales = len(context.layout)
        scales, packed = said[:, :n_scales].view(torch.float32), said[:, n_scales:].view(torch.uint8)
        compiled_terngrad.add(packed, scales * (1 / len(said)), context.layout, out)


def _n_words(layout: Layout) -> int:
    """Of the trits."""
    return -(-layout.numel // (EACH * 4))


def clipped(tops: Tensor, deviations: Tensor, clip: float) -> Tensor:
    """s [K] of the largest |g| and the standard deviations."""
    bounds = (deviations * clip).clamp_(max=LARGEST).float()
    return torch.where(deviations > 0, torch.minimum(tops, bounds), tops)


def deviations(grad: Tensor, layout: Layout) -> Tensor:
    """Standard deviation of each tensor, float64 [K]."""
    if not layout.numel:
        return torch.zeros(len(layout), dtype=torch.float64, device=grad.device)
    counts = layout.lengths(grad.device)
    first = grad[(counts.cumsum(0) - counts).clamp_(max=layout.numel - 1)]
    apart = grad.double() - layout.spread(first.double())
    return deviation(sums(apart, layout), sums(apart.square(), layout), counts)


def deviation(total: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
    """sqrt(mean d^2 - (mean d)^2) of the sums of d and d^2; d: the distance to the tensor's first element.

    So that it is 0 where all elements are the same, and for no others.
    """
    return (squares / counts - (total / counts).square()).clamp_(min=0).sqrt_()

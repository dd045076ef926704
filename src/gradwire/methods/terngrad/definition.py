"""Stochastic rounding to a sign or nothing, a scale a tensor: TernGrad (Wen et al., arXiv:1705.07878)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.arithmetic.finite import LARGEST, unsound
from gradwire.arithmetic.groups import groups_of
from gradwire.codec import numba_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context, Nothing
from gradwire.methods.fixed import Body, Fixed, split
from gradwire.methods.terngrad import trits

BLOCK = 512  # elements of a tensor whose sum is taken first, before those of all its blocks


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
        return len(layout) + trits.n_words(layout.numel)

    def write(self, grad: Tensor, state: Nothing, context: Context) -> Body:
        layout, scales = context.layout, self.scales(grad, context.layout)
        if numba_ready(grad.device):
            from gradwire.methods.terngrad import cpu

            body = torch.empty(self.body_words(layout), dtype=torch.int32)
            body[: len(layout)] = scales.view(torch.int32)
            keys = draws.keys(self.seed, context.step, layout, context.rank)
            packed = body[len(layout) :].view(torch.uint8)
            return Body(body, cpu.write(grad, scales, keys, groups_of(layout, None), packed))
        scale = layout.spread(scales)
        chance = draws.uniform(self.seed, context.step, layout, grad.device, context.rank)
        sent = (scale > 0) & (chance < torch.minimum(grad.abs(), scale) / scale)
        packed = trits.pack(sent.byte() + (sent & (grad < 0)).byte())
        return Body(torch.cat([scales.view(torch.int32), packed]), (sent * scale).sum())

    def scales(self, grad: Tensor, layout: Layout) -> Tensor:
        """s, float32 [K]."""
        tops = groups_of(layout, None).largest(grad)
        if self.clip is None:
            return tops
        deviation = deviations(grad, layout)
        bounds = (deviation * self.clip).clamp_(max=LARGEST).float()
        return torch.where(deviation > 0, torch.minimum(tops, bounds), tops)

    def read(self, bodies: Tensor, context: Context) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The scales over W, and the bytes."""
        scales, words = split(bodies, len(context.layout))
        packed = words.view(torch.uint8)
        return (scales * (1 / len(bodies)), packed), unsound(scales) | (packed > trits.TOP).any(1)

    def add_all(self, said: tuple[Tensor, Tensor], out: Tensor, context: Context) -> None:
        """On a CPU tile by tile, all ranks."""
        layout, (shares, packed) = context.layout, said
        if numba_ready(out.device):
            from gradwire.methods.terngrad import cpu

            cpu.add(packed, shares, groups_of(layout, None), out)
            return
        for share, row in zip(shares, packed, strict=True):
            each, value = trits.unpack(row, layout.numel), layout.spread(share)
            value = torch.where(each == 0, 0.0, value)
            out += torch.where(each == 2, -value, value)


def deviations(grad: Tensor, layout: Layout) -> Tensor:
    """Standard deviation of each tensor, float64 [K]: sqrt(mean d^2 - (mean d)^2), d the distance to its first element.

    So that it is 0 where all elements are the same, and for no others.
    """
    if not layout.numel:
        return torch.zeros(len(layout), dtype=torch.float64, device=grad.device)
    counts, blocks = layout.lengths(grad.device), groups_of(layout, BLOCK)
    firsts = grad[(counts.cumsum(0) - counts).clamp_(max=layout.numel - 1)]
    if numba_ready(grad.device):
        from gradwire.methods.terngrad import cpu

        of_blocks = cpu.moments(grad, firsts, blocks)
    else:
        apart = grad.double() - layout.spread(firsts.double())
        of_blocks = torch.stack([blocks.folded(apart), blocks.folded(apart.square())])
    total, squares = (_of_tensors(each, blocks.above) for each in of_blocks)
    return (squares / counts - (total / counts).square()).clamp_(min=0).sqrt_()


def _of_tensors(sums: Tensor, layout: Layout) -> Tensor:
    """The sum of each tensor, [K]: of blocks, then of blocks of these, until one a tensor is left."""
    if layout.numel == len(layout):
        return sums
    blocks = groups_of(layout, BLOCK)
    return _of_tensors(blocks.folded(sums), blocks.above)

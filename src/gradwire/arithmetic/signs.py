"""One bit an element and two values a group: what the methods of signs share. Plain torch: the definition of right.

A group's mean is taken of whole numbers, |p| in units of 2^-30 of the power of two above the group's largest: the same
bits in whatever order they are summed, so on any device and in any bucket, and wrong by less than 2^-30 of the largest.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.arithmetic.finite import LARGEST
from gradwire.arithmetic.groups import ScaleGroups
from gradwire.codec import fields, numba_ready


class Sides(NamedTuple):
    """Of each group, [G]: the sums of |p| over the elements that are not negative and those that are, and how many."""

    above: Tensor  # float64
    below: Tensor  # float64
    n_below: Tensor  # int64


class Said(NamedTuple):
    """Of each rank: what `add` takes."""

    bits: Tensor  # int32 [W, words]
    highs: Tensor  # float32 [W, G], of a bit that is not set
    lows: Tensor  # float32 [W, G], of one that is


def gather(grad: Tensor, residual: Tensor | None, groups: ScaleGroups) -> Tensor:
    """grad becomes p = r + g; returns max |p| of each group, float32 [G]."""
    if (fast := _machine_code(grad.device)) is not None:
        return fast.gather(grad, residual, groups)  # type: ignore[no-any-return]
    if residual is not None:
        grad.add_(residual).clamp_(-LARGEST, LARGEST)  # a sum beyond float32 must not stay in the residual as inf
    return groups.largest(grad)


def magnitudes(p: Tensor, largest: Tensor, groups: ScaleGroups) -> Tensor:
    """The sum of |p| of each group, float64 [G]."""
    factor, unit = _units(largest)
    if (fast := _machine_code(p.device)) is not None:
        above, below, _ = fast.sides(p, factor, groups)
        total: Tensor = above + below
    else:
        total = groups.sums((p * groups.spread(factor)).round().abs().int())
    return total.double() * unit


def sides(p: Tensor, largest: Tensor, groups: ScaleGroups) -> Sides:
    """The sums of both signs."""
    factor, unit = _units(largest)
    if (fast := _machine_code(p.device)) is not None:
        above, below, n_below = fast.sides(p, factor, groups)
    else:
        whole = (p * groups.spread(factor)).round().int()
        above, below = groups.sums(whole.clamp(min=0)), groups.sums(-whole.clamp(max=0))
        n_below = groups.sums(p < 0)
    return Sides(above.double() * unit, below.double() * unit, n_below)


def _units(largest: Tensor) -> tuple[Tensor, Tensor]:
    """(2^k, 2^-k) with 2^29 <= largest * 2^k < 2^30; below 2^-97 with k = 126, so that both are normal numbers."""
    biased = (largest.view(torch.int32) >> 23).clamp(min=30)
    return ((283 - biased) << 23).view(torch.float32), ((biased - 29) << 23).view(torch.float32).double()


def pack(p: Tensor, zero_below: bool) -> Tensor:
    """int32 [ceil(N / 32)]: the bit of a negative element is 1, of a zero `zero_below`."""
    if (fast := _machine_code(p.device)) is not None:
        return fast.pack(p, zero_below)  # type: ignore[no-any-return]
    return fields.pack(_below(p, zero_below), 1)


def settle(p: Tensor, high: Tensor, low: Tensor, zero_below: bool, residual: Tensor, groups: ScaleGroups) -> Tensor:
    """`pack`, and residual = p - sent, where sent is low [G] for a bit that is set and high [G] for one that is not."""
    if (fast := _machine_code(p.device)) is not None:
        return fast.settle(p, high, low, zero_below, residual, groups)  # type: ignore[no-any-return]
    below = _below(p, zero_below)
    torch.sub(p, torch.where(below, groups.spread(low), groups.spread(high)), out=residual)
    return fields.pack(below, 1)


def add(bits: Tensor, highs: Tensor, lows: Tensor, out: Tensor, groups: ScaleGroups) -> None:
    """out += low or high of each rank, in rank order."""
    if (fast := _machine_code(out.device)) is not None:
        fast.add(bits, highs, lows, out, groups)
        return
    for words, high, low in zip(bits, highs, lows, strict=True):
        below = fields.unpack(words, 1, groups.numel) != 0
        out += torch.where(below, groups.spread(low), groups.spread(high))


def _below(p: Tensor, zero_below: bool) -> Tensor:
    return p <= 0 if zero_below else p < 0


def _machine_code(device: torch.device) -> ModuleType | None:
    """The same functions as machine code, where there is a compiler for it."""
    if not numba_ready(device):
        return None
    from gradwire.arithmetic import signs_cpu

    return signs_cpu

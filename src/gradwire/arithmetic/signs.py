"""One bit an element and two values a run: what the methods of signs share. Plain torch: the definition of right.

A run's mean is taken of whole numbers, |p| in units of 2^-30 of the power of two above the run's largest: the same
bits in whatever order they are summed, so on any device and in any bucket, and wrong by less than 2^-30 of the largest.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.arithmetic.runs import Runs
from gradwire.codec import fields, numba_ready

LARGEST = torch.finfo(torch.float32).max


class Sides(NamedTuple):
    """Of each run, [R]: the sums of |p| over the elements that are not negative and those that are, and how many."""

    above: Tensor  # float64
    below: Tensor  # float64
    n_below: Tensor  # int64


class Said(NamedTuple):
    """Of each rank: what `add` takes."""

    bits: Tensor  # int32 [W, words]
    highs: Tensor  # float32 [W, R], of a bit that is not set
    lows: Tensor  # float32 [W, R], of one that is


def gather(grad: Tensor, residual: Tensor | None, runs: Runs) -> Tensor:
    """grad becomes p = r + g; returns max |p| of each run, float32 [R]."""
    if (fast := _compiled(grad)) is not None:
        return fast.gather(grad, residual, runs)  # type: ignore[no-any-return]
    if residual is not None:
        grad.add_(residual).clamp_(-LARGEST, LARGEST)  # a sum beyond float32 must not stay in the residual as inf
    return runs.largest(grad)


def magnitudes(p: Tensor, largest: Tensor, runs: Runs) -> Tensor:
    """The sum of |p| of each run, float64 [R]."""
    factor, unit = _units(largest)
    if (fast := _compiled(p)) is not None:
        total: Tensor = fast.magnitudes(p, factor, runs)
    else:
        total = runs.sums((p * runs.spread(factor)).round().abs().int())
    return total.double() * unit


def sides(p: Tensor, largest: Tensor, runs: Runs) -> Sides:
    """The sums of both signs."""
    factor, unit = _units(largest)
    if (fast := _compiled(p)) is not None:
        above, below, n_below = fast.sides(p, factor, runs)
    else:
        whole = (p * runs.spread(factor)).round().int()
        above, below = runs.sums(whole.clamp(min=0)), runs.sums(-whole.clamp(max=0))
        n_below = runs.sums(p < 0)
    return Sides(above.double() * unit, below.double() * unit, n_below)


def _units(largest: Tensor) -> tuple[Tensor, Tensor]:
    """(2^k, 2^-k) with 2^29 <= largest * 2^k < 2^30; below 2^-97 with k = 126, so that both are normal numbers."""
    biased = (largest.view(torch.int32) >> 23).clamp(min=30)
    return ((283 - biased) << 23).view(torch.float32), ((biased - 29) << 23).view(torch.float32).double()


def pack(p: Tensor, zero_below: bool) -> Tensor:
    """int32 [ceil(N / 32)]: the bit of a negative element is 1, of a zero `zero_below`."""
    if (fast := _compiled(p)) is not None:
        return fast.pack(p, zero_below)  # type: ignore[no-any-return]
    return fields.pack(_below(p, zero_below), 1)


def settle(p: Tensor, high: Tensor, low: Tensor, zero_below: bool, residual: Tensor, runs: Runs) -> Tensor:
    """`pack`, and residual = p - sent, where sent is low [R] for a bit that is set and high [R] for one that is not."""
    if (fast := _compiled(p)) is not None:
        return fast.settle(p, high, low, zero_below, residual, runs)  # type: ignore[no-any-return]
    below = _below(p, zero_below)
    torch.sub(p, torch.where(below, runs.spread(low), runs.spread(high)), out=residual)
    return fields.pack(below, 1)


def add(bits: Tensor, highs: Tensor, lows: Tensor, out: Tensor, runs: Runs) -> None:
    """out += low or high of each rank, in rank order."""
    if (fast := _compiled(out)) is not None:
        fast.add(bits, highs, lows, out, runs)
        return
    for words, high, low in zip(bits, highs, lows, strict=True):
        below = fields.unpack(words, 1, runs.numel) != 0
        out += torch.where(below, runs.spread(low), runs.spread(high))


def _below(p: Tensor, zero_below: bool) -> Tensor:
    return p <= 0 if zero_below else p < 0


def _compiled(tensor: Tensor) -> ModuleType | None:
    """The same functions as machine code, where there is a compiler for it."""
    return importlib.import_module("gradwire.arithmetic.signs_cpu") if numba_ready(tensor.device) else None

"""The functions of `signs` as machine code for the CPU, of the same names and with the same bits.

Every loop has its own part of the elements, from a whole word to a whole word, and walks the groups in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.finite import LARGEST
from gradwire.arithmetic.groups import ScaleGroups
from gradwire.arithmetic.groups_cpu import MAGNITUDE, WORD, largest_bits, parts
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared

TILE = 4096  # elements that stay in the first cache while all that is done to them is done; whole words
MOST, LEAST = np.float32(LARGEST), np.float32(-LARGEST)
ZERO = np.float32(0)


def gather(grad: Tensor, residual: Tensor | None, groups: ScaleGroups) -> Tensor:
    if residual is None:
        return groups.largest(grad)
    tops = shared(parts(groups.numel), _gather, grad.numpy(), residual.numpy(), groups.ends)
    return torch.from_numpy(np.max(tops, 0)).view(torch.float32)


def sides(p: Tensor, factor: Tensor, groups: ScaleGroups) -> tuple[Tensor, Tensor, Tensor]:
    totals = sum(shared(parts(groups.numel), _sides, p.numpy(), factor.numpy(), groups.ends))
    above, below, n_below = torch.from_numpy(totals)
    return above, below, n_below


def pack(p: Tensor, zero_below: bool) -> Tensor:
    words = np.empty(-(-len(p) // WORD), np.int32)
    shared(parts(len(p)), _pack, p.view(torch.int32).numpy(), np.int32(zero_below), words)
    return torch.from_numpy(words)


def settle(p: Tensor, high: Tensor, low: Tensor, zero_below: bool, residual: Tensor, groups: ScaleGroups) -> Tensor:
    words = np.empty(-(-len(p) // WORD), np.int32)
    values = (high.numpy(), low.numpy(), zero_below)
    shared(parts(groups.numel), _settle, p.numpy(), *values, residual.numpy(), groups.ends, words)
    return torch.from_numpy(words)


def add(bits: Tensor, highs: Tensor, lows: Tensor, out: Tensor, groups: ScaleGroups) -> None:
    values = (highs.contiguous().numpy(), lows.contiguous().numpy())
    shared(parts(groups.numel), _add, bits.numpy(), *values, groups.ends, out.numpy())


@machine_code
def _gather(begin: int, end: int, grad: Array, residual: Array, ends: Array) -> Array:
    """int32 [G]: the bits of the largest |p| of each group."""
    tops = np.zeros(ends.size, np.int32)
    group, at = np.searchsorted(ends, begin, side="right"), begin
    while at < end:
        while ends[group] <= at:
            group += 1
        stop = min(end, ends[group], at + TILE)
        _sum(grad[at:stop], residual[at:stop])
        tops[group] = max(tops[group], largest_bits(grad[at:stop].view(np.int32)))
        at = stop
    return tops


@machine_code
def _sum(grad: Array, residual: Array) -> None:
    for i in range(grad.size):
        grad[i] = min(max(grad[i] + residual[i], LEAST), MOST)


@machine_code
def _sides(begin: int, end: int, p: Array, factors: Array, ends: Array) -> Array:
    """int64 [3, G]: what `_both` says of each group."""
    totals = np.zeros((3, ends.size), np.int64)
    group, at = np.searchsorted(ends, begin, side="right"), begin
    while at < end:
        stop = min(end, ends[group])
        totals[0, group], totals[1, group], totals[2, group] = _both(p[at:stop], factors[group])
        group, at = group + 1, stop
    return totals


@machine_code
def _both(p: Array, factor: np.float32) -> tuple[np.int64, np.int64, np.int64]:
    """Sum above, minus the sum below, how many are below."""
    total, size, n_below = np.int64(0), np.int64(0), np.int64(0)
    for i in range(p.size):
        whole = np.int32(np.rint(p[i] * factor))
        total += np.int64(whole)
        size += np.int64(abs(whole))
        n_below += np.int64(p[i] < ZERO)
    return (size + total) // 2, (size - total) // 2, n_below


@machine_code
def _pack(begin: int, end: int, bits: Array, of_zero: np.int32, words: Array) -> None:
    """The words of elements begin .. end; begin is the first of a word."""
    whole = end // WORD * WORD
    for first in range(begin, whole, WORD):
        words[first // WORD] = _word(bits[first : first + WORD], WORD, of_zero)
    if whole < end:
        words[whole // WORD] = _word(bits[whole:end], end - whole, of_zero)


@machine_code
def _word(bits: Array, count: int, of_zero: np.int32) -> np.int32:
    """A bit is 1 for a negative float32; for a zero, also for -0, `of_zero`."""
    word = np.int32(0)
    for i in range(count):
        below = np.int32(bits[i] < np.int32(0)) if bits[i] & MAGNITUDE else of_zero
        word |= below << np.int32(i)
    return word


@machine_code
def _settle(
    begin: int,
    end: int,
    p: Array,
    high: Array,
    low: Array,
    zero_below: bool,
    residual: Array,
    ends: Array,
    words: Array,
) -> None:
    group = np.searchsorted(ends, begin, side="right")
    for first in range(begin, end, TILE):
        last = min(end, first + TILE)
        _pack(first, last, p.view(np.int32), np.int32(zero_below), words)
        at = first
        while at < last:
            while ends[group] <= at:
                group += 1
            stop = min(last, ends[group])
            _keep(p[at:stop], high[group], low[group], zero_below, residual[at:stop])
            at = stop


@machine_code
def _keep(p: Array, high: np.float32, low: np.float32, zero_below: bool, residual: Array) -> None:
    of_zero = low if zero_below else high
    for i in range(p.size):
        sent = low if p[i] < ZERO else high
        residual[i] = p[i] - (of_zero if p[i] == ZERO else sent)


@machine_code
def _add(begin: int, end: int, bits: Array, highs: Array, lows: Array, ends: Array, out: Array) -> None:
    """Tile by tile, all ranks: the result goes through the cache once."""
    below = np.empty(TILE, np.int32)
    for first in range(begin, end, TILE):
        last = min(end, first + TILE)
        for rank in range(bits.shape[0]):
            _spread(bits[rank, first // WORD : (last + WORD - 1) // WORD], below)
            group, at = np.searchsorted(ends, first, side="right"), first
            while at < last:
                while ends[group] <= at:
                    group += 1
                stop = min(last, ends[group])
                _choose(below[at - first : stop - first], highs[rank, group], lows[rank, group], out[at:stop])
                at = stop


@machine_code
def _spread(words: Array, below: Array) -> None:
    """One number an element: its bit."""
    for i in range(words.size):
        word, first = words[i], i * WORD
        for j in range(32):
            below[first + j] = (word >> np.int32(j)) & np.int32(1)


@machine_code
def _choose(below: Array, high: np.float32, low: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] += low if below[i] else high

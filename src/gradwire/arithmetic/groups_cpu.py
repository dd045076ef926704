"""Groups of a bucket for machine code on the CPU: each thread's part, their largest elements, sums in one order.

A part is cut between whole words of 32 elements, so that who packs bits writes words of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import equal_parts, shared

MAGNITUDE = np.int32(0x7FFFFFFF)
WORD = 32  # elements whose bits make a word
TILE = 16  # elements whose largest is found in one go; mostly none of them passes


def parts(numel: int) -> list[tuple[int, int]]:
    """(begin, end) of every thread's elements, cut between whole words."""
    pieces = equal_parts(numel, torch.get_num_threads())
    step = -(-pieces[0][1] // WORD) * WORD
    return [(min(numel, i * step), min(numel, (i + 1) * step)) for i in range(len(pieces))]


def parts_of_words(n_words: int, each: int) -> list[tuple[int, int]]:
    """(begin, end) of every thread's words, or bytes, of `each` elements."""
    return [(begin // each, end // each) for begin, end in equal_parts(n_words * each, torch.get_num_threads())]


def parts_of_groups(n_groups: int, numel: int) -> list[tuple[int, int]]:
    """(first, last) of every thread's groups, of about as many elements each."""
    n_parts = len(equal_parts(numel, torch.get_num_threads()))
    return [(n_groups * part // n_parts, n_groups * (part + 1) // n_parts) for part in range(n_parts)]


def largest(flat: Tensor, ends: Array) -> Tensor:
    """max |x| of each group, float32 [G]."""
    tops = shared(parts(len(flat)), _largest, flat.view(torch.int32).numpy(), ends)
    return torch.from_numpy(np.max(tops, 0)).view(torch.float32)


@machine_code
def _largest(begin: int, end: int, bits: Array, ends: Array) -> Array:
    """int32 [G]: the bits of the largest |x| of each group."""
    tops = np.zeros(ends.size, np.int32)
    group, at = np.searchsorted(ends, begin, side="right"), begin
    while at < end:
        stop = min(end, ends[group])
        tops[group] = largest_bits(bits[at:stop])
        group, at = group + 1, stop
    return tops


@machine_code
def largest_bits(bits: Array) -> np.int32:
    """As integers, whose order is that of the magnitudes: so the loop is vectorized."""
    top = np.int32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top


@machine_code
def collect(bits: Array, values: Array, least: np.int32, begin: int, places: Array, out: int) -> int:
    """Writes down, from places[out] on, where |x| is not below `least` and its value is not 0; where it stopped.

    bits: of x, as are those of `least`; begin: the place of the first.
    """
    whole = bits.size // TILE * TILE
    for tile in range(0, bits.size, TILE):
        if tile < whole:
            top = np.int32(0)
            for i in range(TILE):
                top = max(top, bits[tile + i] & MAGNITUDE)
            if top < least:
                continue
        for i in range(tile, min(tile + TILE, bits.size)):
            if (bits[i] & MAGNITUDE) >= least and values[i] != 0:
                places[out] = begin + i
                out += 1
    return out


@machine_code
def fold(values: Array, count: int) -> np.float64:
    """The sum of values[:count], which it overwrites: the second half of a power of two is added to the first.

    Zeros behind the last one change nothing, so the power need not be the one that `ScaleGroups.folded` has.
    """
    if count == 0:
        return np.float64(0)
    half = 1
    while 2 * half < count:
        half *= 2
    while count > 1:
        first, second = values[:half], values[half:count]
        for i in range(second.size):
            first[i] += second[i]
        count, half = half, half // 2
    return np.float64(values[0])

"""The largest elements of each tensor as machine code for the CPU: loops that Numba compiles, for largest.py."""

from __future__ import annotations

import numpy as np

from gradwire.compile.machine_code import Array, machine_code

MAGNITUDE = np.int32(0x7FFFFFFF)
TILE = 16  # elements whose largest is found in one go; mostly none of them passes


@machine_code
def floor(flat: Array, factor: int, start: int, n_sample: int, rank: int) -> int:
    """The size that is `rank`-th in a sample of one tensor, at least 1."""
    bits, sizes, place = flat.view(np.int32), np.empty(n_sample, np.int32), start
    for i in range(n_sample):
        sizes[i] = bits[place] & MAGNITUDE
        place += factor
        if place >= bits.size:
            place -= bits.size
    least: int = np.partition(sizes, n_sample - rank)[n_sample - rank]
    return max(least, 1)


@machine_code
def collect(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    slots: Array,
    floors: Array,
    flat: Array,
    places: Array,
    found: Array,
) -> None:
    """Writes down who is not below the floor, segment by segment from its begin on: the place from there; how many."""
    bits = flat.view(np.int32)
    for segment in range(first, last):
        its_bits, its_places = bits[begins[segment] : ends[segment]], places[begins[segment] : ends[segment]]
        least, n_found, whole = floors[slots[segment]], 0, its_bits.size // TILE * TILE
        for tile in range(0, its_bits.size, TILE):
            top = np.int32(0)
            if tile < whole:
                for i in range(TILE):
                    top = max(top, its_bits[tile + i] & MAGNITUDE)
                if top < least:
                    continue
            for i in range(tile, min(tile + TILE, its_bits.size)):
                if its_bits[i] & MAGNITUDE >= least:
                    its_places[n_found] = i
                    n_found += 1
        found[segment] = n_found


@machine_code
def choose(
    cuts: Array,
    begins: Array,
    found: Array,
    places: Array,
    counts: Array,
    lasts: Array,
    flat: Array,
    chosen: Array,
    values: Array,
) -> None:
    """The k largest of what was found, ties by place; after them the last place. values: zeros.

    cuts: the first segment of each tensor.
    """
    bits, entry = flat.view(np.int32), 0
    for slot in range(counts.size):
        k, total, n = counts[slot], found[cuts[slot] : cuts[slot + 1]].sum(), 0
        bound, room = np.int32(0), total  # all
        if total > k:
            sizes = np.empty(total, np.int32)
            for segment in range(cuts[slot], cuts[slot + 1]):
                for i in range(begins[segment], begins[segment] + found[segment]):
                    sizes[n] = bits[begins[segment] + places[i]] & MAGNITUDE
                    n += 1
            bound = np.partition(sizes, total - k)[total - k]
            room = k - (sizes > bound).sum()
        end = entry + k
        for segment in range(cuts[slot], cuts[slot + 1]):
            for i in range(begins[segment], begins[segment] + found[segment]):
                place = begins[segment] + places[i]
                size = bits[place] & MAGNITUDE
                if size > bound or (size == bound and room > 0):
                    room -= size == bound
                    chosen[entry], values[entry] = place, flat[place]
                    entry += 1
        chosen[entry:end] = lasts[slot]
        entry = end

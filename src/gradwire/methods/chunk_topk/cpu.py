"""The k largest of every chunk as machine code for the CPU: the places and values of selection.py.

A chunk is cut into tiles of 16 elements. The k-th largest of the tiles' largest is not above the k-th largest element,
as k tiles have one that is not below it: so what is below it need not be looked at, and of 4096 gaussian elements about
73 are left when k is 64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.groups_cpu import MAGNITUDE, TILE, largest_bits, parts_of_groups
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared
from gradwire.methods.chunk_topk.chunks import Chunks


def largest(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """As selection.largest."""
    groups, n_entries = chunks.groups, chunks.code.n_entries
    places, values = np.empty(n_entries, np.int64), np.zeros(n_entries, np.float32)
    inputs = (groups.begins, groups.ends, chunks.entries.begins, chunks.counts, flat.numpy())
    shared(parts_of_groups(len(groups), groups.numel), _select, *inputs, places, values)
    return torch.from_numpy(places), torch.from_numpy(values)


@machine_code
def _select(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    entries: Array,
    counts: Array,
    flat: Array,
    places: Array,
    values: Array,
) -> None:
    """The entries of the chunks first .. last - 1."""
    longest = 1
    for chunk in range(first, last):
        longest = max(longest, ends[chunk] - begins[chunk])
    tops, sizes = np.empty(-(-longest // TILE), np.int32), np.empty(longest, np.int32)
    found = np.empty(longest, np.int32)
    for chunk in range(first, last):
        k, entry = counts[chunk], entries[chunk]
        if k > 0:
            part = flat[begins[chunk] : ends[chunk]]
            _of_chunk(part, begins[chunk], tops, sizes, found, places[entry : entry + k], values[entry : entry + k])


@machine_code
def _of_chunk(part: Array, begin: int, tops: Array, sizes: Array, found: Array, places: Array, values: Array) -> None:
    """tops, sizes, found: room to work in. values: zeros."""
    k, n, last = places.size, 0, 0
    n_found = _collect(part.view(np.int32), k, tops, sizes, found)
    bound, room = np.int32(0), n_found  # all
    if n_found > k:
        bound = _kth(sizes[:n_found], k)
        room = k - _count(sizes[:n_found], bound + np.int32(1))
    for i in range(n_found):
        if sizes[i] > bound or (sizes[i] == bound and room > 0):
            room -= sizes[i] == bound
            last = found[i]
            places[n], values[n] = begin + last, part[last]
            n += 1
    places[n:] = begin + last


@machine_code
def _collect(bits: Array, k: int, tops: Array, sizes: Array, found: Array) -> int:
    """The sizes and places, in order, of all that may be among the k largest; how many they are."""
    n_tiles, n = (bits.size + TILE - 1) // TILE, 0
    for i in range(n_tiles):
        tops[i] = largest_bits(bits[i * TILE : min((i + 1) * TILE, bits.size)])
    least = np.int32(1)
    if n_tiles >= k:
        least = max(least, _kth(tops[:n_tiles], k))
    for i in range(n_tiles):
        if tops[i] >= least:
            for place in range(i * TILE, min((i + 1) * TILE, bits.size)):
                size = bits[place] & MAGNITUDE
                sizes[n], found[n] = size, place
                n += size >= least  # no jump that depends on it: 1.3 ms instead of 3.7 for 4 M elements on an EPYC
    return n


@machine_code
def _kth(sizes: Array, k: int) -> np.int32:
    """The k-th largest, bit by bit: 0.9 us for 256 on an EPYC, where a partition takes 3."""
    least = np.int32(0)
    for bit in range(30, -1, -1):
        higher = least | np.int32(1 << bit)
        if _count(sizes, higher) >= k:
            least = higher
    return least


@machine_code
def _count(sizes: Array, least: np.int32) -> int:
    """How many are not below it."""
    n = np.int32(0)
    for i in range(sizes.size):
        n += np.int32(sizes[i] >= least)
    return int(n)

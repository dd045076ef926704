"""The largest elements of each tensor as machine code for the CPU: loops for largest.py."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.groups_cpu import MAGNITUDE, collect
from gradwire.codec import CHUNK
from gradwire.codec.quota import Quota, table_of
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.segments import Segments
from gradwire.compile.threads import shared
from gradwire.layout import Slot
from gradwire.methods.topk.largest import EXPECTED, RANK, line_of, sampled


@functools.lru_cache(maxsize=256)
def _search(quota: Quota, n_threads: int) -> tuple[Segments, Array, Array, list[tuple[int, Slot, int]]]:
    """The segments; k and the last place of each tensor, int64 [K]; whose floor is from a sample of which size."""
    table, numbered = table_of(quota, torch.device("cpu")), enumerate(zip(quota.layout, quota.counts, strict=True))
    samples = [(i, slot, EXPECTED * slot.numel // k) for i, (slot, k) in numbered if sampled(k, slot.numel)]
    lasts = (table.offsets + table.numels - 1).numpy()
    return Segments.of(quota.layout, n_threads, CHUNK), table.counts.numpy(), lasts, samples


def largest(flat: Tensor, quota: Quota, step: int, exact: bool, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """As largest.largest, in two loops: those not below the floor, then the k largest of these."""
    segments, counts, lasts, samples = _search(quota, torch.get_num_threads())
    values, floors = flat.numpy(), np.ones(len(counts), np.int32)
    for number, slot, size in samples:
        floors[number] = _floor(slot.of(flat).numpy(), *line_of(step, slot), size, RANK)
    if active is not None:
        floors[~active.numpy()] = MAGNITUDE
    found, places = np.empty(segments.count, np.int64), np.empty(len(values), np.int32)
    where, lists = (segments.begins, segments.ends, segments.slots), (values, places, found)
    shared(segments.parts, _collect, *where, floors, *lists)
    if exact:
        short = (segments.by_slot(found) < counts) & (floors > 1) & (floors < MAGNITUDE)
        if short.any():
            shared(segments.parts, _collect, *where, np.where(short, np.int32(1), floors), *lists)
    chosen, sent = np.empty(quota.total, np.int64), np.zeros(quota.total, np.float32)
    _choose(segments.of_slots, segments.begins, found, places, counts, lasts, values, chosen, sent)
    return torch.from_numpy(chosen), torch.from_numpy(sent)


@machine_code
def _floor(flat: Array, factor: int, start: int, n_sample: int, rank: int) -> int:
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
def _collect(
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
    for segment in range(first, last):
        begin, bits = begins[segment], flat[begins[segment] : ends[segment]].view(np.int32)
        found[segment] = collect(bits, bits, floors[slots[segment]], 0, places, begin) - begin


@machine_code
def _choose(
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

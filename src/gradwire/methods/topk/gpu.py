"""The largest elements of each tensor for CUDA: Triton kernels for largest.py, of which one reads every element.

    floor     per tensor: the floor, from its sample
    collect   per tile: who is not below the floor is a candidate, written down with its place; the only long pass
    tally     per tile, three times: how many candidates have which next digit of their size, among those that have the
              first digits of the k-th largest: 11 bits, then 10, then 10
    count     per tile: how many are larger than the k-th largest, and how many are as large
    write     per tile: its entries; the tiles of a tensor share those that stay empty

Everything is an integer: sizes are the bits of |x|. Sums are made by atomic additions, whose order is of no account. T
tiles, runs of elements of one tensor; K tensors; N elements. Seven kernels, eight if it is to be exact, whatever the
number of tensors, and nothing waits for the device. Memory for the time of the call: 6 bytes an element, since all of
them may be candidates, and 24 KiB a tensor.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec import CHUNK
from gradwire.codec.gpu import shared_memory
from gradwire.codec.gpu.records import is_live
from gradwire.codec.quota import Quota, table_of
from gradwire.compile.tiles import ALIGN as TILE_ALIGN
from gradwire.compile.tiles import Tiles, on_device, tiles_of
from gradwire.methods.topk.largest import EXPECTED, FEWEST, RANK, line_of, sampled

TILE, PIECE, COLLECTING_WARPS = 32768, 4096, 8  # places of a tile, at most 2^15, and those looked at together
LANES, WARPS = 1024, 8  # candidates looked at together; not fewer than threads
SAMPLED, SAMPLING_WARPS = 4096, 16  # elements of a sample, likewise
ALIGN = tl.constexpr(TILE_ALIGN)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LEVELS = tl.constexpr(3)
BINS = tl.constexpr(2048)  # of the first level, and the room of the others
FIELDS = tl.constexpr(3)  # of a row of the plan


class Workspace(NamedTuple):
    """What the kernels hand each other."""

    floors: Any  # int32 [K]
    places: Any  # int16 [N], of the candidates in their tile, from its first place on
    bits: Any  # int32 [N], their values, likewise
    found: Any  # int32 [T], how many there are
    above: Any  # int32 [T]
    equal: Any  # int32 [T]
    plan: Any  # int32 [K, LEVELS, FIELDS], what `settle` finds
    totals: Any  # int32 [K], zeros at first: candidates after the first `collect`
    histograms: Any  # int32 [K, LEVELS, BINS], zeros at first


@triton.jit
def digits(memory, size, inside, prefix, level: tl.constexpr):
    """Counts the next digit of those whose digits so far are `prefix`."""
    shift: tl.constexpr = 10 * (LEVELS - 1 - level)
    bins: tl.constexpr = BINS if level == 0 else BINS // 2
    above: tl.constexpr = 31 if level == 0 else shift + 10
    shared_memory.increment(memory, (size >> shift) & (bins - 1), inside & (size >> above == prefix))


@triton.jit
def pick(counts, prefix, rest, bins: tl.constexpr):
    """(prefix with the digit of the rest-th largest, or -1 if there are fewer; the rest among its equals; how many).

    counts [bins]: of the digits.
    """
    total = tl.sum(counts)
    from_here = total - tl.cumsum(counts) + counts
    n_digits = tl.sum((from_here >= rest).to(tl.int32))
    larger = tl.max(tl.where(from_here < rest, from_here, 0))
    return tl.where(n_digits > 0, prefix * bins + n_digits - 1, -1), rest - larger, total


@triton.jit
def refine(bits, n_sample, numel, factor, start, prefix, rest, memory, level: tl.constexpr, lanes: tl.constexpr):
    """(prefix, rest) with one more digit of the rest-th largest of a sample. bits: of the tensor."""
    bins: tl.constexpr = BINS if level == 0 else BINS // 2
    shared_memory.clear(memory, bins)
    tl.debug_barrier()
    for first in tl.range(0, n_sample, lanes):
        number = first + tl.arange(0, lanes)
        place = (factor * number + start) % numel
        size = tl.load(bits + place, mask=number < n_sample, other=0) & MAGNITUDE
        digits(memory, size, number < n_sample, prefix, level)
    tl.debug_barrier()
    prefix, rest, _ = pick(shared_memory.get(memory, tl.arange(0, bins)), prefix, rest, bins)
    tl.debug_barrier()  # before the next level clears it
    return prefix, rest


@triton.jit
def floor_kernel(
    bits, lines, cut, table, work,
    expected: tl.constexpr, rank: tl.constexpr, fewest: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Program: a tensor. lines int64 [K, 2]: of `progression`; the constants are those of largest.py."""
    slot, memory = tl.program_id(0), shared_memory.reserve(BINS)
    live, floor = is_live(cut, slot), 1
    k, numel = tl.load(table.counts + slot), tl.load(table.numels + slot)
    if live & (k >= fewest) & (2 * k <= numel):
        n_sample = (expected * numel // k).to(tl.int32)
        its_bits = bits + tl.load(table.offsets + slot)
        factor, start = tl.load(lines + 2 * slot), tl.load(lines + 2 * slot + 1)
        prefix, rest = 0, rank
        for level in tl.static_range(LEVELS):
            prefix, rest = refine(its_bits, n_sample, numel, factor, start, prefix, rest, memory, level, lanes)
        floor = tl.maximum(prefix, 1)
    tl.store(work.floors + slot, tl.where(live, floor, MAGNITUDE))


@triton.jit
def collect(bits, base, low, high, floor, work, whole: tl.constexpr, size: tl.constexpr, piece: tl.constexpr):
    """Writes the candidates of a tile down, in the order of their places; how many."""
    n_found = low  # the list begins at the tile's first place
    for start in tl.range(0, size if whole else high, piece):
        lane = start + tl.arange(0, piece)
        # no mask where it can be: one that could end anywhere makes every load 4 bytes wide
        inside = None if whole else (lane >= low) & (lane < high)
        word = tl.load(bits + base + lane, mask=inside, other=None if whole else 0)
        passes = word & MAGNITUDE >= floor  # which is at least 1
        # Said to be contiguous so that the values stay in the threads that loaded them, and do not go through shared
        # memory first. The mask, different from lane to lane, keeps every store one element wide. The value is left to
        # `tally`, since a store that hardly any lane makes takes its instructions all the same.
        at = tl.max_contiguous(tl.multiple_of(n_found + tl.cumsum(passes.to(tl.int32)) - 1, 4), 4)
        tl.store(work.places + base + at, lane.to(tl.int16), mask=passes)
        n_found += tl.sum(passes.to(tl.int32))
    return n_found - low


@triton.jit
def collect_kernel(bits, cut, table, work, again: tl.constexpr, size: tl.constexpr, piece: tl.constexpr):
    """Program: a tile. again: only in tensors whose floor let fewer than k pass, now all but zeros."""
    tile = tl.program_id(0)
    slot, low, high = tl.load(cut.slot + tile), tl.load(cut.low + tile), tl.load(cut.high + tile)
    base, floor = tl.multiple_of(tl.load(cut.base + tile), ALIGN), tl.load(work.floors + slot)
    wanted = True
    if again:
        wanted = (floor > 1) & (floor < MAGNITUDE) & (tl.load(work.totals + slot) < tl.load(table.counts + slot))
        floor = 1
    if wanted:
        n_found = 0
        if floor < MAGNITUDE:
            if high - low == size:
                n_found = collect(bits, base, low, high, floor, work, True, size, piece)
            else:
                n_found = collect(bits, base, low, high, floor, work, False, size, piece)
        tl.store(work.found + tile, n_found)
        if not again:
            tl.atomic_add(work.totals + slot, n_found, sem="relaxed")


@triton.jit
def settle(tile, slot, cut, table, work, level: tl.constexpr):
    """(prefix, rest): the first digits of the k-th largest, and the how-manieth it is among those that have them.

    From the histogram of the level before; -1 where there are fewer than k. The first tile of a tensor writes it down.
    """
    prefix, rest = 0, tl.load(table.counts + slot).to(tl.int32)
    if level > 0:
        bins: tl.constexpr = BINS if level == 1 else BINS // 2
        row = slot * LEVELS + level - 1
        if level > 1:
            earlier = work.plan + (row - 1) * FIELDS
            prefix, rest = tl.load(earlier), tl.load(earlier + 1)
        counts = tl.load(work.histograms + row.to(tl.int64) * BINS + tl.arange(0, bins))
        prefix, rest, total = pick(counts, prefix, rest, bins)
        if tile == tl.load(cut.first_of_slot + slot):
            its_row = work.plan + row * FIELDS
            tl.store(its_row, prefix)
            tl.store(its_row + 1, rest)
            tl.store(its_row + 2, total)
    return prefix, rest


@triton.jit
def tally_kernel(bits, cut, table, work, level: tl.constexpr, lanes: tl.constexpr):
    """Program: a tile. On the first level the values of the candidates are written down, too."""
    tile, memory = tl.program_id(0), shared_memory.reserve(BINS)
    bins: tl.constexpr = BINS if level == 0 else BINS // 2
    slot = tl.load(cut.slot + tile)
    prefix, _ = settle(tile, slot, cut, table, work, level)
    n_found = tl.where(prefix < 0, 0, tl.load(work.found + tile))
    if n_found > 0:
        base, low = tl.load(cut.base + tile), tl.load(cut.low + tile)
        shared_memory.clear(memory, bins)
        tl.debug_barrier()
        for start in tl.range(0, n_found, lanes):
            at = start + tl.arange(0, lanes)
            inside = at < n_found
            if level == 0:
                place = tl.load(work.places + base + low + at, mask=inside, other=0)
                word = tl.load(bits + base + place, mask=inside, other=0)
                tl.store(work.bits + base + low + at, word, mask=inside)
            else:
                word = tl.load(work.bits + base + low + at, mask=inside, other=0)
            digits(memory, word & MAGNITUDE, inside, prefix, level)
        tl.debug_barrier()
        counts = shared_memory.get(memory, tl.arange(0, bins))
        histogram = work.histograms + (slot * LEVELS + level).to(tl.int64) * BINS
        tl.atomic_add(histogram + tl.arange(0, bins), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def count_kernel(cut, table, work, lanes: tl.constexpr):
    """Program: a tile. Where there are fewer than k, all are larger than the bound of -1."""
    tile = tl.program_id(0)
    slot, n_found = tl.load(cut.slot + tile), tl.load(work.found + tile)
    bound, _ = settle(tile, slot, cut, table, work, LEVELS)
    its_bits = work.bits + tl.load(cut.base + tile) + tl.load(cut.low + tile)
    above, equal = tl.zeros((lanes,), tl.int32), tl.zeros((lanes,), tl.int32)
    for start in tl.range(0, n_found, lanes):
        at = start + tl.arange(0, lanes)
        size = tl.load(its_bits + at, mask=at < n_found, other=0) & MAGNITUDE
        above += ((at < n_found) & (size > bound)).to(tl.int32)
        equal += ((at < n_found) & (size == bound)).to(tl.int32)
    tl.store(work.above + tile, tl.sum(above))
    tl.store(work.equal + tile, tl.sum(equal))


@triton.jit
def fill(place, entries, values, begin, end, lanes: tl.constexpr):
    """Entries begin .. end - 1 are empty."""
    for start in tl.range(begin, end, lanes):
        at = start + tl.arange(0, lanes)
        tl.store(entries + at, tl.zeros((lanes,), tl.int64) + place, mask=at < end)
        tl.store(values + at, tl.zeros((lanes,), tl.int32), mask=at < end)


@triton.jit
def before(tile, first, work, lanes: tl.constexpr):
    """How many in the tensor's tiles before this one are above the bound, and how many are equal."""
    above, equal = tl.zeros((lanes,), tl.int32), tl.zeros((lanes,), tl.int32)
    for start in tl.range(first, tile, lanes):
        at = start + tl.arange(0, lanes)
        above += tl.load(work.above + at, mask=at < tile, other=0)
        equal += tl.load(work.equal + at, mask=at < tile, other=0)
    return tl.sum(above), tl.sum(equal)


@triton.jit
def write_kernel(cut, table, work, places, values, lanes: tl.constexpr):
    """Program: a tile. places int64 [E], values int32 [E], the bits."""
    tile = tl.program_id(0)
    slot, n_found = tl.load(cut.slot + tile), tl.load(work.found + tile)
    k = tl.load(table.counts + slot).to(tl.int32)
    plan = work.plan + slot * LEVELS * FIELDS
    settled = plan + (LEVELS - 1) * FIELDS
    bound, room = tl.load(settled), tl.load(settled + 1)
    first, end = tl.load(cut.first_of_slot + slot), tl.load(cut.first_of_slot + slot + 1)
    base, low = tl.load(cut.base + tile), tl.load(cut.low + tile)
    entries, its_values = places + tl.load(table.firsts + slot), values + tl.load(table.firsts + slot)
    above, equal = before(tile, first, work, lanes)
    for start in tl.range(0, n_found, lanes):
        at = start + tl.arange(0, lanes)
        word = tl.load(work.bits + base + low + at, mask=at < n_found, other=0)
        place = tl.load(work.places + base + low + at, mask=at < n_found, other=0)
        is_above = (at < n_found) & (word & MAGNITUDE > bound)
        is_equal = (at < n_found) & (word & MAGNITUDE == bound)
        both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        earlier = tl.cumsum(both) - both
        its_above, its_equal = above + (earlier & 0xFFFF), equal + (earlier >> 16)
        chosen, entry = is_above | (is_equal & (its_equal < room)), its_above + tl.minimum(its_equal, room)
        tl.store(entries + entry, base + place, mask=chosen)
        tl.store(its_values + entry, word, mask=chosen)
        total = tl.sum(both)
        above += total & 0xFFFF
        equal += total >> 16
    n_sent = tl.minimum(k, tl.load(plan + 2))
    share = tl.cdiv(k - n_sent, end - first)
    begin = n_sent + (tile - first) * share
    last = tl.load(table.offsets + slot) + tl.load(table.numels + slot) - 1
    fill(last, entries, its_values, begin, tl.minimum(begin + share, k), lanes)


def largest(flat: Tensor, quota: Quota, step: int, exact: bool, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """As largest.largest.

    If it is to be exact the sample is asked all the same, and where its floor lets too few pass all are collected.
    """
    device, layout = flat.device, quota.layout
    tiles = tiles_of(layout, device, CHUNK, TILE, 1)
    places = torch.empty(quota.total, dtype=torch.int64, device=device)
    values = torch.empty(quota.total, dtype=torch.int32, device=device)
    if tiles.n_tiles:
        bits, table, work = flat.view(torch.int32), table_of(quota, device), _room(tiles, device)
        cut = tiles.table_with(active)
        lines = _kept(quota, device) if exact else _lines(quota, step, device)
        grid, common = (tiles.n_tiles,), {"lanes": LANES, "num_warps": WARPS}
        floor_kernel[(len(layout),)](
            bits, lines, cut, table, work, EXPECTED, RANK, FEWEST, lanes=SAMPLED, num_warps=SAMPLING_WARPS
        )  # fmt: skip
        for again in (False, True) if exact else (False,):
            collect_kernel[grid](bits, cut, table, work, again, size=TILE, piece=PIECE, num_warps=COLLECTING_WARPS)
        for level in range(LEVELS.value):
            tally_kernel[grid](bits, cut, table, work, level, **common)
        count_kernel[grid](cut, table, work, **common)
        write_kernel[grid](cut, table, work, places, values, **common)
    return places, values.view(torch.float32)


def _room(tiles: Tiles, device: torch.device) -> Workspace:
    n_tensors, n_tiles, n_bins = tiles.n_slots, tiles.n_tiles, tiles.n_slots * LEVELS.value * BINS.value
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    zeros = torch.zeros(n_bins + n_tensors, dtype=torch.int32, device=device)
    return Workspace(
        floors=empty(n_tensors),
        places=empty(tiles.numel, dtype=torch.int16),
        bits=empty(tiles.numel),
        found=empty(n_tiles),
        above=empty(n_tiles),
        equal=empty(n_tiles),
        plan=empty(n_tensors * LEVELS.value * FIELDS.value),
        totals=zeros[n_bins:],
        histograms=zeros,
    )


def _lines(quota: Quota, step: int, device: torch.device) -> Tensor:
    """int64 [2 K]: the factor and start of each tensor's sample; 0 where there is none."""
    numbers: list[int] = []
    for slot, k in zip(quota.layout, quota.counts, strict=True):
        numbers += line_of(step, slot) if sampled(k, slot.numel) else (0, 0)
    return on_device(numbers, device)


@functools.lru_cache(maxsize=64)
def _kept(quota: Quota, device: torch.device) -> Tensor:
    """The same in every step, for who is exact whatever the sample: so that a CUDA graph has nothing to copy."""
    return _lines(quota, 0, device)

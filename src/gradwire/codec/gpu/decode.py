"""Step 6 for CUDA: from messages to their mean. Triton kernels and their launchers; nothing waits for the device.

check   one pass over the words of all messages: places that are outside or out of order, exponents that float32 cannot
        say, and where the words of each tile begin. That is known only if nothing is wrong: if anything is, `add`
        does nothing
add     out = the mean over the ranks, in their order, tile by tile in shared memory

What is before them, from a message to words, is in head.py and unpack.py.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator,assignment"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec import header
from gradwire.codec.form import Shape
from gradwire.codec.gpu import shared_memory as shared
from gradwire.codec.gpu.blocks import slots_of
from gradwire.codec.gpu.head import inspect
from gradwire.codec.gpu.unpack import unpack
from gradwire.codec.interface import PROBLEMS, Rule
from gradwire.compile.launching import UNFUSED
from gradwire.compile.tiles import Tiles, tiles_of
from gradwire.layout import Layout

PLACE = tl.constexpr((1 << 28) - 1)
SAFE = tl.constexpr(-126 + 7)  # with an exponent from here on, 2^(e - d) is no denormal
LOOKED_AT = tl.constexpr(128)  # exponents or tensors at a time
FAR = tl.constexpr((1 << 63) - 1)  # behind all places
AHEAD = tl.constexpr(8)  # ranks whose words are on their way together
CHECKED, CHECKING_WARPS = 2048, 4  # words that one program looks at; H200: 0.045 ms, 1024 0.056, 512 0.055
# Places of a tile. H200, 8 messages of 2.7 million words, 2^28 places: 0.304 ms with 2 warps, 0.309 with 4 and 0.324
# with 1; tiles of 4096 or 2048 take 0.306. Sums by atomic additions, in L2, took 0.44.
TILE, WARPS = 8192, 2
ADDED, WRITTEN = 128, 512  # words of a rank and places of a tile at a time
SEARCHED = 128  # tiles at a time


@triton.jit
def lowest_of(exponents, n_slots):
    lowest = tl.full((LOOKED_AT,), 127, tl.int32)
    for start in tl.range(0, n_slots, LOOKED_AT):
        slot = start + tl.arange(0, LOOKED_AT)
        lowest = tl.minimum(lowest, tl.load(exponents + slot, mask=slot < n_slots, other=127))
    return tl.min(lowest)


@triton.jit
def places_of(message, at, have, counts, n_chunks, chunk):
    """The places of the words at `at`, of which we `have` some: their chunks, and where in these."""
    number, stop = at * 0, 0
    for following in tl.range(1, n_chunks):
        stop += tl.load(counts + following - 1)
        number = tl.where(at >= stop, following, number)
    return number, tl.load(message + at, mask=have, other=0) & PLACE


@triton.jit
def has_small(
    message, start, counts, n_chunks, chunk, numel, total, exponents, ends, n_slots, steps, width: tl.constexpr
):
    """Whether some of `width` words from `start` on stand for less than float32 can say."""
    at = start + tl.arange(0, width)
    number, place = places_of(message, at, at < total, counts, n_chunks, chunk)
    slot = slots_of(tl.minimum(place + number.to(tl.int64) * chunk, numel - 1), ends, n_slots, steps)
    exponent = tl.load(exponents + slot, mask=at < total, other=127)
    d = (tl.load(message + at, mask=at < total, other=0) >> 28) & 7
    return tl.max((exponent - d < -126).to(tl.int32)) != 0


@triton.jit
def look(message, start, number, cut, starts, n_ranks, chunk, numel, n_slots, size: tl.constexpr, width: tl.constexpr):
    """Words as they nearly always come: `width` from `start` on and the one before, all of chunk `number`.

    Are they right, in one tensor, and no two neighbours further apart than a tile? Then this writes where the tiles
    begin that begin among them, without a search. Returns whether they are, and the tensor.
    """
    at = start + tl.arange(0, width)
    last = tl.load(message + start + width - 1) & PLACE
    edge = tl.load(message + start - 1) & PLACE
    place, before = tl.load(message + at) & PLACE, tl.load(message + at - 1) & PLACE
    index, slot = last + number * (tl.zeros((), tl.int64) + chunk), 0
    inside = tl.minimum(index, numel - 1)
    for some in tl.range(0, n_slots, LOOKED_AT):  # side by side: a binary search waits for every one of its loads
        end = some + tl.arange(0, LOOKED_AT)
        slot += tl.sum((tl.load(cut.end + end, mask=end < n_slots, other=FAR) <= inside).to(tl.int32))
    first = tl.maximum(tl.load(cut.first_of_slot + slot), tl.load(cut.first_of_chunk + number))
    base = (tl.load(cut.base + first) - tl.load(cut.origin + first)).to(tl.int32)
    widest = tl.max((place - before - 1).to(tl.uint32, bitcast=True))  # of those out of order 2^31 and more
    right = (widest < size) & (edge >= base + tl.load(cut.low + first)) & (index < numel) & (last < chunk)
    if right:
        place, before = place - base, before - base
        tile = first + (place.to(tl.uint32, bitcast=True) // size).to(tl.int32)
        tl.store(starts + tile * n_ranks, at, mask=(place ^ before) >= size)
    return right, slot


@triton.jit
def wrong_places(message, start, counts, n_chunks, chunk, numel, total, width: tl.constexpr):
    """Whether some of `width` words from `start` on are outside or out of order. Places are compared within their
    chunk, in 32 bits."""
    at = start + tl.arange(0, width)
    place = tl.load(message + at, mask=at < total, other=0) & PLACE
    before = tl.load(message + at - 1, mask=(at > 0) & (at < total), other=0) & PLACE
    falls, outside, stop, origin = at < 0, False, 0, tl.zeros((), tl.int64)
    for number in tl.range(0, n_chunks):
        begin = stop
        stop += tl.load(counts + number)
        falls |= (at > begin) & (at < stop) & (place <= before)
        last = tl.minimum(stop, start + width) - 1
        if last >= tl.maximum(begin, start):
            outside |= (tl.load(message + last) & PLACE) >= tl.minimum(numel - origin, chunk)
        origin += chunk
    return outside | (tl.max(falls.to(tl.int32)) != 0)


@triton.jit
def tiles_around(
    message, start, stop, counts, cut, n_tiles, n_chunks, chunk, numel, n_slots, steps, size: tl.constexpr
):
    """The tiles of the last word before `start` and of the last one before `stop`: no tile, -1, for none."""
    side = tl.arange(0, 2)
    at = tl.where(side == 0, start, stop) - 1
    number, place = places_of(message, at, at >= 0, counts, n_chunks, chunk)
    index = tl.minimum(place + number.to(tl.int64) * chunk, numel - 1)
    slot = slots_of(index, cut.end, n_slots, steps)
    first = tl.maximum(tl.load(cut.first_of_slot + slot), tl.load(cut.first_of_chunk + number))
    tile = first + ((index - tl.load(cut.base + first)) // size).to(tl.int32)
    tile = tl.where(at >= 0, tl.minimum(tile, n_tiles - 1), -1)  # any words may come
    return tl.sum(tl.where(side == 0, tile, 0)), tl.sum(tl.where(side == 1, tile, 0))


@triton.jit
def write_starts(
    message, start, stop, counts, cut, first, last, starts, n_ranks, n_tiles, n_chunks, chunk,
    width: tl.constexpr, searched: tl.constexpr,
):  # fmt: skip
    """Of the tiles first .. last, which begin among at most `width` words start .. stop - 1: binary searches side by
    side. A tile n_tiles stands for the end of all."""
    for some in tl.range(first, last + 1, searched):
        tile = some + tl.arange(0, searched)
        ours = tile < n_tiles
        origin = tl.load(cut.origin + tile, mask=ours, other=0)
        place = tl.load(cut.base + tile, mask=ours, other=0) - origin
        place, its_chunk = (place + tl.load(cut.low + tile, mask=ours, other=0)).to(tl.int32), origin // chunk
        begin, end, upto = tile * 0 + stop, tile * 0 + stop, 0
        for number in tl.range(0, n_chunks):
            begin = tl.where(ours & (its_chunk == number), upto, begin)
            upto += tl.load(counts + number)
            end = tl.where(ours & (its_chunk == number), upto, end)
        begin, end = tl.minimum(tl.maximum(begin, start), stop), tl.minimum(tl.maximum(end, start), stop)
        left = width
        while left > 0:
            middle, is_open = begin + (end - begin) // 2, begin < end
            after = is_open & ((tl.load(message + middle, mask=is_open, other=0) & PLACE) < place)
            begin, end = tl.where(after, middle + 1, begin), tl.where(after, end, middle)
            left //= 2
        tl.store(starts + tile * n_ranks, begin, mask=tile <= last)


@triton.jit(do_not_specialize=["n_ranks", "n_tiles", "n_chunks", "chunk", "n_slots", "steps"])
def check_kernel(
    words, stride: tl.int64, counts, exponents, sound, cut, found, bad, starts, n_ranks, n_tiles, n_chunks, chunk,
    numel: tl.int64, n_slots, steps, hybrid: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    searched: tl.constexpr,
):  # fmt: skip
    """Program (part of a message, rank). starts int32 [tiles + 1, W]; bad: whether anything is found in any message,
    or one is not sound."""
    rank, start = tl.program_id(1), tl.program_id(0) * width
    message, its_counts, its_exponents = words + rank * stride, counts + rank * n_chunks, exponents + rank * n_slots
    is_sound, total, whole = tl.load(sound + rank) != 0, 0, -1  # the chunk with all of this part and the word before
    for number in tl.range(0, n_chunks):
        begin = total
        total += tl.load(its_counts + number)
        whole = tl.where((begin < start) & (start + width <= total), number, whole)
    total = tl.where(is_sound, total, 0)
    tl.store(bad, 1, mask=is_sound == 0)
    stop = tl.minimum(start + width, total)
    right, slot, wrong, lowest = False, 0, False, 127
    if (start + width < total) & (whole >= 0):  # behind the last words there may be tiles without any
        right, slot = look(message, start, whole, cut, starts + rank, n_ranks, chunk, numel, n_slots, size, width)
    if right:
        lowest = tl.load(its_exponents + slot)
    elif (start < total) | (start == 0):
        if start < total:
            wrong = wrong_places(message, start, its_counts, n_chunks, chunk, numel, total, width)
            lowest = lowest_of(its_exponents, n_slots)
        before, last = tiles_around(
            message, start, stop, its_counts, cut, n_tiles, n_chunks, chunk, numel, n_slots, steps, size
        )
        last = tl.where(stop == total, n_tiles, last)
        write_starts(
            message, start, stop, its_counts, cut, before + 1, last, starts + rank, n_ranks, n_tiles, n_chunks,
            chunk, width, searched,
        )  # fmt: skip
    if wrong:
        tl.store(found + rank * 2, 1)
        tl.store(bad, 1)
    if hybrid:
        lowest = 127
    if lowest < SAFE:
        small = has_small(
            message, start, its_counts, n_chunks, chunk, numel, total, its_exponents, cut.end, n_slots, steps, width
        )  # fmt: skip
        tl.store(found + rank * 2 + 1, 1, mask=small)
        tl.store(bad, 1, mask=small)


@triton.jit
def coming_words(words, stride, bounds, exponents, first, n_ranks, n_slots, lane, bad):
    """Of AHEAD ranks from `first` on: where their words of a tile begin and end, the exponent, the first of the words.

    bounds: where they begin, and in the next row where they end. No words if `bad`. Loads that do not wait for one
    another.
    """
    coming = ()
    for ahead in tl.static_range(AHEAD):
        rank = first + ahead
        ours = (rank < n_ranks) & (bad == 0)
        begin, end = tl.load(bounds + rank, mask=ours, other=0), tl.load(bounds + n_ranks + rank, mask=ours, other=0)
        exponent = tl.load(exponents + rank * n_slots, mask=ours, other=0)
        word = tl.load(words + rank * stride + begin + lane, mask=begin + lane < end, other=0)
        coming += ((begin, end, exponent, word),)
    return coming


@triton.jit
def add_words(memory, word, have, exponent, tau, share, origin, hybrid: tl.constexpr):
    """memory += value / W at the places of some words of one rank, all different. origin: of the tile in its chunk."""
    if hybrid:
        value = tl.zeros_like(word).to(tl.float32) + tau
    else:
        value = ((exponent - ((word >> 28) & 7) + 127) << 23).to(tl.float32, bitcast=True)
    value *= share
    shared.add(memory, (word & PLACE) - origin, tl.where(word < 0, -value, value), have)


@triton.jit(do_not_specialize=["n_ranks", "n_slots"])
def add_kernel(
    words, stride: tl.int64, starts, bad, exponents, cut, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, size: tl.constexpr, lanes: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """One program a tile, which is summed up in shared memory and goes to global memory once; if `bad`, never."""
    tile, lane, is_bad = tl.program_id(0), tl.arange(0, lanes), tl.load(bad)
    memory = shared.reserve(size)
    its_base, its_exponents = tl.load(cut.base + tile), exponents + tl.load(cut.slot + tile)
    its_origin = (its_base - tl.load(cut.origin + tile)).to(tl.int32)
    shared.clear(memory, size)
    for first in tl.range(0, n_ranks, AHEAD):
        bounds = starts + tile * n_ranks
        coming = coming_words(words, stride, bounds, its_exponents, first, n_ranks, n_slots, lane, is_bad)
        for ahead in tl.static_range(AHEAD):
            begin, end, exponent, word = coming[ahead]
            message = words + (first + ahead) * stride
            tl.debug_barrier()  # the sums of one rank are in place before the next one reads them
            for at in tl.range(begin, end, lanes):
                following = tl.load(message + at + lanes + lane, mask=at + lanes + lane < end, other=0)
                add_words(memory, word, at + lane < end, exponent, tau, share, its_origin, hybrid)
                word = following
    tl.debug_barrier()
    its_low, its_high = tl.load(cut.low + tile), tl.where(is_bad == 0, tl.load(cut.high + tile), 0)
    for start in tl.range(0, size, piece):
        place = start + tl.arange(0, piece)
        value = shared.get(memory, place).to(tl.float32, bitcast=True)
        if its_high - its_low == size:
            tl.store(out + its_base + place, value)
        else:
            tl.store(out + its_base + place, value, mask=(place >= its_low) & (place < its_high))


def decode(messages: Tensor, shape: Shape, rule: Rule, step: int, out: Tensor) -> Tensor:
    """As `reference.decode`."""
    problems = inspect(messages, shape, step)
    words, counts, sound = messages[:, shape.body], messages[:, shape.counts], ~problems.any(1)
    if shape.blocks is not None:
        words, counts, broken = unpack(messages[:, shape.orders], words, sound, shape.blocks, shape.chunk)
        problems, sound = torch.cat([problems, broken[:, None]], 1), sound & ~broken
    exponents = header.exponents_of(messages, shape)
    return torch.cat([problems, add(words, counts, sound, exponents, shape.layout, rule, shape.chunk, out)], 1)


def add(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor
) -> Tensor:
    """As `reference.add`."""
    tiles, n_ranks = tiles_of(layout, out.device, chunk, TILE, 1), len(words)
    found = torch.zeros(n_ranks * len(PROBLEMS) + 1, dtype=torch.uint8, device=words.device)
    if tiles.n_tiles:
        exponents = exponents.contiguous()
        starts = _check(words, counts.contiguous(), sound, exponents, tiles, rule, chunk, found)
        values = (float(np.float32(rule.tau or 0)), 1 / n_ranks, n_ranks, tiles.n_slots)
        add_kernel[(tiles.n_tiles,)](
            words, words.stride(0), starts, found[-1:], exponents, tiles.table, out, *values,
            hybrid=rule.tau is not None, size=TILE, lanes=ADDED, piece=WRITTEN, num_warps=WARPS, **UNFUSED,
        )  # fmt: skip
    return found[:-1].view(n_ranks, len(PROBLEMS)).view(torch.bool)


def _check(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, tiles: Tiles, rule: Rule, chunk: int, found: Tensor
) -> Tensor:
    """Fills in what is wrong, [W, PROBLEMS], and whether anything is. Returns how many of each rank's words come before
    each tile, and all: int32 [tiles + 1, W], if nothing is wrong."""
    n_ranks, n_tiles = len(words), tiles.n_tiles
    starts = torch.empty(n_tiles + 1, n_ranks, dtype=torch.int32, device=words.device)
    numbers = (n_ranks, n_tiles, counts.shape[1], chunk, tiles.numel, tiles.n_slots, tiles.n_slots.bit_length())
    check_kernel[(max(1, -(-words.shape[1] // CHECKED)), n_ranks)](
        words, words.stride(0), counts, exponents, sound, tiles.table, found, found[-1:], starts, *numbers,
        hybrid=rule.tau is not None, size=TILE, width=CHECKED, searched=SEARCHED, num_warps=CHECKING_WARPS, maxnreg=64,
    )  # fmt: skip
    return starts

"""Step 6 for CUDA, and the checksum of steps 4 and 6: Triton kernels.

checksum   sum_i w_i (2 i + 1) of every message
check      places that are outside or out of order, exponents that float32 cannot say
starts     where the words of each tile begin in every rank's message
add        out = the mean over the ranks, in their order, tile by tile in shared memory
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels import triton_shared as shared

PLACE = tl.constexpr((1 << 28) - 1)
SAFE = tl.constexpr(-126 + 7)  # with an exponent from here on, 2^(e - d) is no denormal
LOOKED_AT = tl.constexpr(128)  # exponents at a time
AHEAD = tl.constexpr(8)  # ranks whose words are on their way together


@triton.jit(do_not_specialize=["n_words"])
def checksum_kernel(messages, stride: tl.int64, n_words, total, width: tl.constexpr, rounds: tl.constexpr):
    """Program (part of a message, rank). Integers modulo 2^64: the order in which they are added is of no account."""
    rank, begin = tl.program_id(1), tl.program_id(0).to(tl.int64) * (width * rounds)
    message, left = messages + rank * stride + begin, n_words - begin
    plain, weighted = tl.zeros((width,), tl.int64), tl.zeros((width,), tl.int64)
    for number in tl.static_range(rounds):
        at = number * width + tl.arange(0, width)
        word = tl.load(message + at, mask=at < left, other=0).to(tl.int64)
        plain += word
        weighted += word * at
    tl.atomic_add(total + rank, tl.sum(plain) * (2 * begin + 1) + tl.sum(weighted) * 2, sem="relaxed")


@triton.jit
def slots_of(index, ends, n_slots, steps):
    """Which tensor each flat index is in: how many tensors end at it or before, the last one for those behind it."""
    low, high = tl.zeros_like(index).to(tl.int32), tl.zeros_like(index).to(tl.int32) + n_slots
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        open_ = low < high
        after = open_ & (tl.load(ends + middle, mask=open_, other=0) <= index)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    return tl.minimum(low, n_slots - 1)


@triton.jit
def lowest_of(exponents, n_slots):
    lowest = tl.full((LOOKED_AT,), 127, tl.int32)
    for start in tl.range(0, n_slots, LOOKED_AT):
        slot = start + tl.arange(0, LOOKED_AT)
        lowest = tl.minimum(lowest, tl.load(exponents + slot, mask=slot < n_slots, other=127))
    return tl.min(lowest)


@triton.jit
def has_small(
    message, start, counts, n_chunks, chunk, numel, exponents, ends, n_slots, steps, bad, width: tl.constexpr
):
    """Whether some of `width` words from `start` on stand for less than float32 can say."""
    at, found, stop, origin = start + tl.arange(0, width), False, 0, tl.zeros((), tl.int64)
    for number in tl.range(0, n_chunks):
        begin = stop
        stop += tl.load(counts + number)
        first, last = tl.maximum(begin, start), tl.minimum(stop, start + width) - 1
        if first <= last:
            have = (at >= first) & (at <= last)
            word = tl.load(message + at, mask=have, other=0)
            edge = (tl.load(message + tl.where(tl.arange(0, 2) == 0, first, last)) & PLACE) + origin
            slot = slots_of(tl.minimum(edge, numel - 1), ends, n_slots, steps)
            # nearly always all in one tensor, and a search for every word would take long
            if bad | (tl.min(slot) != tl.max(slot)):
                index = tl.minimum((word & PLACE) + origin, numel - 1)
                exponent = tl.load(exponents + slots_of(index, ends, n_slots, steps), mask=have, other=127)
            else:
                exponent = tl.load(exponents + tl.min(slot)) + tl.zeros((width,), tl.int32)
            found |= tl.max((have & (exponent - ((word >> 28) & 7) < -126)).to(tl.int32)) != 0
        origin += chunk
    return found


@triton.jit(do_not_specialize=["n_chunks", "chunk", "n_slots", "steps"])
def check_kernel(
    words, stride: tl.int64, counts, exponents, ends, found, n_chunks, chunk, numel: tl.int64, n_slots, steps,
    hybrid: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program (part of a message, rank). Places are compared within their chunk, in 32 bits."""
    rank, start = tl.program_id(1), tl.program_id(0) * width
    message, its_counts, its_exponents = words + rank * stride, counts + rank * n_chunks, exponents + rank * n_slots
    at, total = start + tl.arange(0, width), 0
    for number in tl.range(0, n_chunks):
        total += tl.load(its_counts + number)
    if start < total:
        place = tl.load(message + at, mask=at < total, other=0) & PLACE
        before = tl.load(message + at - 1, mask=(at > 0) & (at < total), other=0) & PLACE
        lowest = 127
        if not hybrid:
            lowest = lowest_of(its_exponents, n_slots)
        falls, outside, stop, origin = at < 0, False, 0, tl.zeros((), tl.int64)
        for number in tl.range(0, n_chunks):
            begin = stop
            stop += tl.load(its_counts + number)
            falls |= (at > begin) & (at < stop) & (place <= before)
            last = tl.minimum(stop, start + width) - 1
            if last >= tl.maximum(begin, start):
                outside |= (tl.load(message + last) & PLACE) >= tl.minimum(numel - origin, chunk)
            origin += chunk
        bad = outside | (tl.max(falls.to(tl.int32)) != 0)
        if bad:
            tl.store(found + rank * 2, 1)
        if lowest < SAFE:
            small = has_small(
                message, start, its_counts, n_chunks, chunk, numel, its_exponents, ends, n_slots, steps, bad, width
            )
            tl.store(found + rank * 2 + 1, 1, mask=small)


@triton.jit(do_not_specialize=["n_ranks", "n_tiles", "n_chunks", "chunk", "steps"])
def starts_kernel(
    words, stride: tl.int64, counts, base, low, origin, starts, n_ranks, n_tiles, n_chunks, chunk, steps,
    width: tl.constexpr,
):  # fmt: skip
    """Program (some tiles, rank): binary searches side by side. starts int32 [tiles + 1, W]."""
    rank, tile = tl.program_id(1), tl.program_id(0) * width + tl.arange(0, width)
    ours = tile < n_tiles
    its_origin = tl.load(origin + tile, mask=ours, other=0)
    place = tl.load(base + tile, mask=ours, other=0) - its_origin + tl.load(low + tile, mask=ours, other=0)
    place, its_chunk = place.to(tl.int32), (its_origin // chunk).to(tl.int32)
    begin, end, stop = tile * 0, tile * 0, 0
    for number in tl.range(0, n_chunks):
        begin = tl.where(its_chunk == number, stop, begin)
        stop += tl.load(counts + rank * n_chunks + number)
        end = tl.where(its_chunk == number, stop, end)
    begin, end = tl.where(ours, begin, stop), tl.where(ours, end, stop)
    message = words + rank * stride
    for _ in tl.range(0, steps):
        middle = begin + (end - begin) // 2
        is_open = begin < end
        after = is_open & ((tl.load(message + middle, mask=is_open, other=0) & PLACE) < place)
        begin, end = tl.where(after, middle + 1, begin), tl.where(after, end, middle)
    tl.store(starts + tile * n_ranks + rank, begin, mask=tile <= n_tiles)


@triton.jit
def coming_words(words, stride, bounds, exponents, first, n_ranks, n_slots, lane):
    """Of AHEAD ranks from `first` on: where their words of a tile begin and end, the exponent, the first of the words.

    bounds: where they begin, and in the next row where they end. Loads that do not wait for one another.
    """
    coming = ()
    for ahead in tl.static_range(AHEAD):
        rank = first + ahead
        ours = rank < n_ranks
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
    words, stride: tl.int64, starts, exponents, base, low, high, slot, origin, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, size: tl.constexpr, lanes: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """One program a tile, which is summed up in shared memory and goes to global memory once."""
    tile, lane = tl.program_id(0), tl.arange(0, lanes)
    memory = shared.reserve(size)
    its_base, its_exponents = tl.load(base + tile), exponents + tl.load(slot + tile)
    its_origin = (its_base - tl.load(origin + tile)).to(tl.int32)
    shared.clear(memory, size)
    for first in tl.range(0, n_ranks, AHEAD):
        coming = coming_words(words, stride, starts + tile * n_ranks, its_exponents, first, n_ranks, n_slots, lane)
        for ahead in tl.static_range(AHEAD):
            begin, end, exponent, word = coming[ahead]
            message = words + (first + ahead) * stride
            tl.debug_barrier()  # the sums of one rank are in place before the next one reads them
            for at in tl.range(begin, end, lanes):
                following = tl.load(message + at + lanes + lane, mask=at + lanes + lane < end, other=0)
                add_words(memory, word, at + lane < end, exponent, tau, share, its_origin, hybrid)
                word = following
    tl.debug_barrier()
    its_low, its_high = tl.load(low + tile), tl.load(high + tile)
    for start in tl.range(0, size, piece):
        place = start + tl.arange(0, piece)
        value = shared.get(memory, place).to(tl.float32, bitcast=True)
        if its_high - its_low == size:
            tl.store(out + its_base + place, value)
        else:
            tl.store(out + its_base + place, value, mask=(place >= its_low) & (place < its_high))

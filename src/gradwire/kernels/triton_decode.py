"""Step 6 for CUDA, and the checksum of steps 4 and 6: Triton kernels.

    checksum   sum_i w_i (2 i + 1) of every message
    check      places that are outside or out of order, exponents that float32 cannot say
    starts     where the words of each tile begin in every rank's message
    add        out = the mean over the ranks, one program a tile: no atomics, the same order of addition everywhere
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,type-arg"

from __future__ import annotations

import triton
import triton.language as tl

PLACE = tl.constexpr((1 << 28) - 1)


@triton.jit(do_not_specialize=["n_words"])
def checksum_kernel(messages, stride, n_words, total, width: tl.constexpr):
    """Program (part of a message, rank). Integers modulo 2^64: the order in which they are added is of no account."""
    rank = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    word = tl.load(messages + rank.to(tl.int64) * stride + place, mask=place < n_words, other=0)
    tl.atomic_add(total + rank, tl.sum(word.to(tl.int64) * (2 * place + 1)), sem="relaxed")


@triton.jit
def slots_of(index, ends, n_slots, steps):
    """Which tensor each flat index is in: how many tensors end at it or before."""
    low, high = tl.zeros_like(index).to(tl.int32), tl.zeros_like(index).to(tl.int32) + n_slots
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        open_ = low < high
        after = open_ & (tl.load(ends + middle, mask=open_, other=0) <= index)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    return low


@triton.jit(do_not_specialize=["n_chunks", "chunk", "numel", "n_slots", "steps"])
def check_kernel(
    words, stride, counts, exponents, ends, found, n_chunks, chunk, numel, n_slots, steps,
    hybrid: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program (part of a message, rank)."""
    rank = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * width + tl.arange(0, width)
    base = tl.zeros((width,), tl.int64) - 1  # of the word's chunk; -1: after the last one
    first = at < 0  # of its chunk
    stop = 0
    for number in tl.range(0, n_chunks):
        begin = stop
        stop += tl.load(counts + rank * n_chunks + number)
        base = tl.where((at >= begin) & (at < stop), number * chunk.to(tl.int64), base)
        first |= at == begin
    have = base >= 0
    if tl.max(have.to(tl.int32)) != 0:
        word = tl.load(words + rank * stride + at, mask=have, other=0)
        before = tl.load(words + rank * stride + at - 1, mask=have & (first == 0), other=0) & PLACE
        place = word & PLACE
        index = base + place
        outside = (place >= chunk) | (index >= numel) | ((first == 0) & (place <= before))
        if tl.max((have & outside).to(tl.int32)) != 0:
            tl.store(found + rank * 2, 1)
        if not hybrid:
            index = tl.minimum(tl.maximum(index, 0), tl.maximum(numel - 1, 0))
            edge = tl.where(tl.arange(0, 2) == 0, tl.min(tl.where(have, index, numel)), tl.max(tl.where(have, index, 0)))
            edges = tl.minimum(slots_of(edge, ends, n_slots, steps), n_slots - 1)
            if tl.min(edges) == tl.max(edges):  # nearly always: a search for every word would take six times as long
                exponent = tl.load(exponents + rank * n_slots + tl.min(edges)) + tl.zeros((width,), tl.int32)
            else:
                slot = tl.minimum(slots_of(index, ends, n_slots, steps), n_slots - 1)
                exponent = tl.load(exponents + rank * n_slots + slot, mask=have, other=0)
            small = exponent - ((word >> 28) & 7) < -126
            if tl.max((have & small).to(tl.int32)) != 0:
                tl.store(found + rank * 2 + 1, 1)


@triton.jit(do_not_specialize=["n_ranks", "n_tiles", "n_chunks", "chunk", "steps"])
def starts_kernel(
    words, stride, counts, base, low, origin, starts, n_ranks, n_tiles, n_chunks, chunk, steps,
    group: tl.constexpr, width: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Program: some tiles of all ranks, binary searches side by side. starts int32 [tiles + 1, W]."""
    tile, rank = tl.program_id(0) * width + tl.arange(0, width)[:, None], tl.arange(0, ranks)[None, :]
    ours = tile < n_tiles
    its_origin = tl.load(origin + tile // group, mask=ours, other=0)
    place = (tl.load(base + tile, mask=ours, other=0) + tl.load(low + tile, mask=ours, other=0) - its_origin).to(tl.int32)
    its_chunk = (its_origin // chunk).to(tl.int32)
    begin, end = tl.zeros((width, ranks), tl.int32), tl.zeros((width, ranks), tl.int32)
    stop = tl.zeros((1, ranks), tl.int32)
    for number in tl.range(0, n_chunks):
        begin = tl.where(its_chunk == number, stop, begin)
        stop += tl.load(counts + rank * n_chunks + number, mask=rank < n_ranks, other=0)
        end = tl.where(its_chunk == number, stop, end)
    begin, end = tl.where(ours, begin, stop), tl.where(ours, end, stop)
    message = words + rank.to(tl.int64) * stride
    for _ in tl.range(0, steps):
        middle = begin + (end - begin) // 2
        is_open = begin < end
        word = tl.load(message + middle, mask=is_open, other=0) & PLACE
        after = is_open & (word < place)
        begin, end = tl.where(after, middle + 1, begin), tl.where(after, end, middle)
    tl.store(starts + tile * n_ranks + rank, begin, mask=(tile <= n_tiles) & (rank < n_ranks))


@triton.jit
def add_words(word, have, exponent, tau, share, origin, out, hybrid: tl.constexpr):
    """out += value / W at the places of some words of one rank, all different. origin: of the chunk, from `out`."""
    if hybrid:
        value = tl.zeros_like(word).to(tl.float32) + tau
    else:
        value = ((exponent - ((word >> 28) & 7) + 127) << 23).to(tl.float32, bitcast=True)
    value *= share
    at = out + (word & PLACE) - origin
    old = tl.load(at, mask=have, other=0.0)
    tl.store(at, old + tl.where(word < 0, -value, value), mask=have)


@triton.jit
def words_of(words, stride, bounds, rank, n_ranks, lanes: tl.constexpr):
    """Where one rank's words for a tile begin and end, and the first of them; nothing if there is no such rank."""
    begin = tl.load(bounds + rank, mask=rank < n_ranks, other=0)
    end = tl.load(bounds + n_ranks + rank, mask=rank < n_ranks, other=0)
    at = begin + tl.arange(0, lanes)
    return begin, end, tl.load(words + rank * stride + at, mask=at < end, other=0)


@triton.jit(do_not_specialize=["n_ranks", "n_slots"])
def add_kernel(
    words, stride: tl.int64, starts, exponents, base, low, high, slot, origin, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One program a tile: zeros, then rank after rank. The tile stays in the cache and goes to memory once.

    The words of the next two ranks are on their way while one rank's are added.
    """
    tile, lane = tl.program_id(0), tl.arange(0, lanes)
    its_base = tl.multiple_of(tl.load(base + tile), 32)
    its_low, its_high = tl.load(low + tile), tl.load(high + tile)
    its_slot = tl.load(slot + tile // group)
    its_origin = (its_base - tl.load(origin + tile // group)).to(tl.int32)
    bounds = starts + tile * n_ranks
    begin, end, word = words_of(words, stride, bounds, 0, n_ranks, lanes)
    next_begin, next_end, next_word = words_of(words, stride, bounds, 1, n_ranks, lanes)
    place = tl.arange(0, size)
    if its_high - its_low == size:
        tl.store(out + its_base + place, tl.zeros((size,), tl.float32))
    else:
        tl.store(out + its_base + place, tl.zeros((size,), tl.float32), mask=(place >= its_low) & (place < its_high))
    message = words  # of this rank
    for rank in tl.range(0, n_ranks):
        later_begin, later_end, later_word = words_of(words, stride, bounds, rank + 2, n_ranks, lanes)
        exponent = tl.load(exponents + rank * n_slots + its_slot)
        tl.debug_barrier()  # the sums of one rank are in place before the next one reads them
        add_words(word, begin + lane < end, exponent, tau, share, its_origin, out + its_base, hybrid)
        for at in tl.range(begin + lanes, end, lanes):
            have = at + lane < end
            other = tl.load(message + at + lane, mask=have, other=0)
            add_words(other, have, exponent, tau, share, its_origin, out + its_base, hybrid)
        message += stride
        word, begin, end = next_word, next_begin, next_end
        next_word, next_begin, next_end = later_word, later_begin, later_end

"""Step 6 for CUDA, and the checksum of steps 4 and 6: Triton kernels.

checksum   sum_i w_i (2 i + 1) of every message
check      places that are outside or out of order, exponents that float32 cannot say
starts     where the words of each tile begin in every rank's message
add        out = the mean over the ranks, one program a tile: the ranks in order, where the order can matter
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

PLACE = tl.constexpr((1 << 28) - 1)
NOTHING = tl.constexpr(-128)


@triton.jit(do_not_specialize=["n_words"])
def checksum_kernel(messages, stride, n_words, total, width: tl.constexpr):
    """Program (part of a message, rank). Integers modulo 2^64: the order in which they are added is of no account."""
    rank = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    word = tl.load(messages + rank.to(tl.int64) * stride + place, mask=place < n_words, other=0)
    tl.atomic_add(total + rank, tl.sum(word.to(tl.int64) * (2 * place + 1)), sem="relaxed")


@triton.jit
def stretch(number):
    """In 64 bits."""
    return tl.full((), 0, tl.int64) + number


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


@triton.jit(do_not_specialize=["n_chunks", "chunk", "n_slots", "steps"])
def check_kernel(
    words, stride: tl.int64, counts, exponents, ends, found, n_chunks, chunk, numel: tl.int64, n_slots, steps,
    hybrid: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program (part of a message, rank). Places are compared within their chunk, in 32 bits."""
    rank = tl.program_id(1)
    start = tl.program_id(0) * width
    at = start + tl.arange(0, width)
    first, its_chunk, its_end = at < 0, at * 0, at * 0  # first of its chunk; the chunk and its places
    stop = 0
    for number in tl.range(0, n_chunks):
        begin = stop
        stop += tl.load(counts + rank * n_chunks + number)
        its_chunk = tl.where(at >= begin, number, its_chunk)
        its_end = tl.where(at >= begin, tl.minimum(numel - number * stretch(chunk), chunk).to(tl.int32), its_end)
        first |= at == begin
    if start < stop:
        message, have = words + rank * stride, at < stop
        word = tl.load(message + at, mask=have, other=0)
        before = tl.load(message + at - 1, mask=have & (first == 0), other=0) & PLACE
        place = word & PLACE
        outside = (place >= its_end) | ((first == 0) & (place <= before))
        if tl.max((have & outside).to(tl.int32)) != 0:
            tl.store(found + rank * 2, 1)
        if not hybrid:
            number = tl.min(its_chunk)
            least, most = tl.min(tl.where(have, place, PLACE)), tl.max(tl.where(have, place, 0))
            edge = tl.where(tl.arange(0, 2) == 0, least, most) + number * stretch(chunk)
            edge = tl.minimum(edge, tl.maximum(numel - 1, 0))
            edges = tl.minimum(slots_of(edge, ends, n_slots, steps), n_slots - 1)
            # nearly always all in one tensor, and a search for every word would take long
            if (tl.min(edges) == tl.max(edges)) & (number == tl.max(its_chunk)):
                exponent = tl.load(exponents + rank * n_slots + tl.min(edges)) + tl.zeros((width,), tl.int32)
            else:
                index = tl.minimum(its_chunk * stretch(chunk) + place, tl.maximum(numel - 1, 0))
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
    place = tl.load(base + tile, mask=ours, other=0) - its_origin
    place = (place + tl.load(low + tile, mask=ours, other=0)).to(tl.int32)
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
def add_words(word, have, exponent, tau, share, origin, out, hybrid: tl.constexpr, exact: tl.constexpr):
    """out += value / W at the places of some words of one rank, all different. origin: of the chunk, from `out`."""
    if hybrid:
        value = tl.zeros_like(word).to(tl.float32) + tau
    else:
        value = ((exponent - ((word >> 28) & 7) + 127) << 23).to(tl.float32, bitcast=True)
    value *= share
    value, at = tl.where(word < 0, -value, value), out + (word & PLACE) - origin
    if exact:
        tl.atomic_add(at, value, mask=have, sem="relaxed")
    else:
        tl.store(at, tl.load(at, mask=have, other=0.0) + value, mask=have)


@triton.jit
def is_exact(exponents, n_ranks, n_slots, slot, share, ranks: tl.constexpr):
    """Whether the sums of a tensor are exact, so that the order of the additions is of no account.

    Where 1/W is a power of two all values are +-2^(e - d) / W: multiples of the smallest, which must be no denormal
    (atomic additions flush those), and in all at most 2^24 times as large.
    """
    rank = tl.arange(0, ranks)
    exponent = tl.load(exponents + rank * n_slots + slot, mask=rank < n_ranks, other=NOTHING)
    largest = tl.max(exponent)
    smallest = tl.min(tl.where(exponent == NOTHING, 127, exponent))
    bits = (tl.zeros((1,), tl.float32) + share).to(tl.int32, bitcast=True)
    power = tl.max(bits & 0x007FFFFF) == 0
    down = 127 - (tl.max(bits) >> 23)  # log2 W
    return power & (largest - smallest + 7 + down <= 24) & (smallest - 7 - down >= -126)


@triton.jit
def add_rank_by_rank(
    words, stride, bounds, exponents, origin, slot, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The words of all ranks for one tile, `out`. bounds: where they begin, and in the next row where they end."""
    lane = tl.arange(0, lanes)
    message = words
    for rank in tl.range(0, n_ranks):
        begin, end = tl.load(bounds + rank), tl.load(bounds + n_ranks + rank)
        exponent = tl.load(exponents + rank * n_slots + slot)
        tl.debug_barrier()  # the sums of one rank are in place before the next one reads them
        for at in tl.range(begin, end, lanes):
            have = at + lane < end
            word = tl.load(message + at + lane, mask=have, other=0)
            add_words(word, have, exponent, tau, share, origin, out, hybrid, False)
        message += stride


@triton.jit
def add_all_ranks(
    words, stride, bounds, exponents, origin, slot, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, lanes: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """As `add_rank_by_rank`, where every order gives the same: the rows are ranks, side by side."""
    rank, lane = tl.arange(0, ranks), tl.arange(0, lanes)[None, :]
    ours = rank < n_ranks
    begin = tl.load(bounds + rank, mask=ours, other=0)
    end = tl.load(bounds + n_ranks + rank, mask=ours, other=0)
    exponent = tl.load(exponents + rank * n_slots + slot, mask=ours, other=0)
    for start in tl.range(0, tl.max(end - begin), lanes):
        at = begin[:, None] + start + lane
        have = at < end[:, None]
        word = tl.load(words + rank.to(tl.int64)[:, None] * stride + at, mask=have, other=0)
        add_words(word, have, exponent[:, None], tau, share, origin, out, hybrid, True)


@triton.jit(do_not_specialize=["n_ranks", "n_slots"])
def add_kernel(
    words, stride: tl.int64, starts, exponents, base, low, high, slot, origin, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """One program a tile: zeros, then the ranks. The tile stays in the cache and goes to memory once."""
    tile = tl.program_id(0)
    its_base = tl.multiple_of(tl.load(base + tile), 32)
    its_low, its_high = tl.load(low + tile), tl.load(high + tile)
    its_slot = tl.load(slot + tile // group)
    its_origin = (its_base - tl.load(origin + tile // group)).to(tl.int32)
    place = tl.arange(0, size)
    if its_high - its_low == size:
        tl.store(out + its_base + place, tl.zeros((size,), tl.float32))
    else:
        tl.store(out + its_base + place, tl.zeros((size,), tl.float32), mask=(place >= its_low) & (place < its_high))
    here, bounds = out + its_base, starts + tile * n_ranks
    exact = False
    if not hybrid:
        exact = is_exact(exponents, n_ranks, n_slots, its_slot, share, ranks)
    tl.debug_barrier()
    if exact:
        add_all_ranks(
            words, stride, bounds, exponents, its_origin, its_slot, here, tau, share, n_ranks, n_slots,
            hybrid, lanes, ranks,
        )  # fmt: skip
    else:
        add_rank_by_rank(
            words, stride, bounds, exponents, its_origin, its_slot, here, tau, share, n_ranks, n_slots,
            hybrid, lanes,
        )  # fmt: skip

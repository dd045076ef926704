"""The compact format of steps 4 and 6 for CUDA: Triton kernels that turn words into a body and back.

docs/wire-format.md specifies the bytes. One program a block of the format:

    geometry    begin, length and tensor of every block
    order       per tensor: its codes by falling frequency, and which shape
    survey      how many words each block's payload takes
    write       the payloads: fields are merged 32 elements at a time, then or-ed into a body of zeros
    directory   reading: where payloads begin and how many elements they say they have
    read        places, then codes; every bound is checked, nothing outside is read or written whatever came

B blocks, K tensors, W ranks. Bit positions are counted from the start of a payload.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

PLACE = tl.constexpr((1 << 28) - 1)
SKEWED = tl.constexpr(1 << 24)
ROW = tl.constexpr(32)


class Cut(NamedTuple):
    """begin int64 [B], length int32 [B], tensor int32 [B]."""

    begin: Any
    length: Any
    tensor: Any


@triton.jit
def floor_log2(value):
    """Of 1 .. 2^25, 0 of 0. A float32 holds these exactly or rounds to its own binade's end, so its exponent is right
    below 2^24; larger ones are halved first."""
    large = value >= 1 << 24
    bits = tl.where(large, value >> 1, value).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(value > 0, (bits >> 23) - 127 + large.to(tl.int32), 0)


@triton.jit
def count_bits(length):
    """Bits of c - 1, for c = 1 .. L."""
    return tl.where(length > 1, floor_log2(tl.maximum(length - 1, 1)) + 1, 0)


@triton.jit
def low_bits(length, count):
    return floor_log2((length - count) // tl.maximum(count, 1))


@triton.jit(do_not_specialize=["n_blocks", "n_slots", "steps"])
def geometry_kernel(tables, begin, length, tensor, n_blocks, n_slots, steps, width: tl.constexpr):
    """tables int64: first block [K + 1], nominal length, offset, numel, capacity [K] each."""
    block = tl.program_id(0) * width + tl.arange(0, width)
    ours = block < n_blocks
    low, high = tl.zeros((width,), tl.int32), tl.zeros((width,), tl.int32) + n_slots
    for _step in tl.range(0, steps):  # the last tensor whose first block is not behind this one
        middle = (low + high) // 2
        after = (low < high) & (tl.load(tables + middle + 1, mask=ours & (low < high), other=0) <= block)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    slot = tl.where(ours, low, 0)
    nominal = tl.load(tables + n_slots + 1 + slot, mask=ours, other=1)
    within = (block - tl.load(tables + slot, mask=ours, other=0)) * nominal
    offset = tl.load(tables + 2 * n_slots + 1 + slot, mask=ours, other=0)
    numel = tl.load(tables + 3 * n_slots + 1 + slot, mask=ours, other=0)
    tl.store(begin + block, offset + within, mask=ours)
    tl.store(length + block, tl.minimum(nominal, numel - within).to(tl.int32), mask=ours)
    tl.store(tensor + block, slot, mask=ours)


@triton.jit
def order_kernel(codes, orders):
    """One program a tensor: d by falling frequency, ties the smaller first; skewed where that is strictly cheaper."""
    slot = tl.program_id(0)
    own, other = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    mine, theirs = tl.load(codes + slot * 8 + own), tl.load(codes + slot * 8 + other)
    symbol = tl.sum(((theirs > mine) | ((theirs == mine) & (other < own))).to(tl.int32), axis=1)
    d, often = tl.arange(0, 8), tl.load(codes + slot * 8 + tl.arange(0, 8)).to(tl.int64)
    skewed_bits = tl.where(symbol < 2, 0, tl.where(symbol < 4, 1, 2))
    shape = tl.where(tl.sum(often * skewed_bits) < tl.sum(often), SKEWED, 0)
    tl.store(orders + slot, tl.sum(d << (3 * symbol)) | shape)


@triton.jit
def become(d, order):
    """(class, extra bits, their number) of d under an order."""
    symbol = d * 0
    for s in tl.static_range(8):
        symbol = tl.where(((order >> (3 * s)) & 7) == d, s, symbol)
    skewed = (order & SKEWED) != 0
    kind = tl.where(skewed, tl.where(symbol < 2, symbol, tl.where(symbol < 4, 2, 3)), symbol >> 1)
    first, width = first_and_width(kind, skewed)
    return kind, symbol - first, width


@triton.jit
def first_and_width(kind, skewed):
    """First symbol of a class, and how many extra bits it has."""
    first = tl.where(skewed, tl.where(kind < 3, kind, 4), kind * 2)
    width = tl.where(skewed, tl.where(kind < 2, 0, kind - 1), 1)
    return first, width


@triton.jit
def elements(words, starts, counts, block, at, have, begin, n_chunks, chunk):
    """(gap, code) of the words at `at` of a block that begins at the flat place `begin`."""
    its_chunk = begin // chunk
    shift, before_shift = at * 0, at * 0
    stop = 0
    for number in tl.range(0, n_chunks):
        stop += tl.load(counts + number)
        shift += tl.where((at >= stop) & (number >= its_chunk), chunk, 0)
        before_shift += tl.where((at - 1 >= stop) & (number >= its_chunk), chunk, 0)
    origin = (begin - its_chunk * chunk).to(tl.int32)
    first = at == tl.load(starts + block)
    word = tl.load(words + at, mask=have, other=0)
    before = tl.load(words + at - 1, mask=have & (first == 0), other=0)
    place = (word & PLACE) + shift - origin
    before = tl.where(first, -1, (before & PLACE) + before_shift - origin)
    return tl.where(have, place - before - 1, 0), (word >> 28) & 15


@triton.jit(do_not_specialize=["n_chunks", "chunk"])
def survey_kernel(
    words, starts, counts, cut, orders, sizes, n_chunks, chunk, hybrid: tl.constexpr, lanes: tl.constexpr
):
    """One program a block: the words of its payload."""
    block = tl.program_id(0)
    first, stop = tl.load(starts + block), tl.load(starts + block + 1)
    count, size = stop - first, 0
    if count > 0:
        length, begin = tl.load(cut.length + block), tl.load(cut.begin + block)
        k = low_bits(length, count)
        order = tl.load(orders + tl.load(cut.tensor + block))
        bits = count_bits(length) + count * (k + 1 + (1 if hybrid else 3))
        for start in tl.range(first, stop, lanes):
            at = start + tl.arange(0, lanes)
            have = at < stop
            gap, code = elements(words, starts, counts, block, at, have, begin, n_chunks, chunk)
            bits += tl.sum(gap >> k)
            if not hybrid:
                _kind, _extra, width = become(code & 7, order)
                bits += tl.sum(tl.where(have, width, 0))
        size = (bits + 31) // 32
    tl.store(sizes + block, size)


@triton.jit
def deposit(payload, position, value, width, have, rows: tl.constexpr):
    """Ors fields of `width` <= 24 bits into a payload that is zero there.

    32 neighbours are merged before they go to memory: they ascend, so they share a few words. [rows * 32] each.
    """
    position, value = tl.reshape(position, (rows, ROW)), tl.reshape(value, (rows, ROW))
    have = tl.reshape((have & (width > 0)).to(tl.int32), (rows, ROW)) != 0
    first = tl.min(tl.where(have, position, 0x7FFFFFFF), axis=1) >> 5
    last = tl.max(tl.where(have, position + tl.reshape(width, (rows, ROW)) - 1, -1), axis=1) >> 5
    n_words = tl.where(last >= 0, last - first + 1, 0)
    for number in tl.range(0, tl.max(n_words)):
        shift = position - (first[:, None] + number) * 32
        inside = have & (shift > -32) & (shift < 32)
        piece = tl.where(shift >= 0, value << (shift & 31), value >> ((-shift) & 31))
        word = tl.sum(tl.where(inside, piece, 0), axis=1)
        tl.atomic_or(payload + first + number, word, mask=(number < n_words) & (word != 0), sem="relaxed")


@triton.jit(do_not_specialize=["n_chunks", "chunk", "n_blocks"])
def write_kernel(
    words, starts, counts, cut, orders, ends, body, n_chunks, chunk, n_blocks,
    hybrid: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """One program a block: its entry of the directory and its payload."""
    block = tl.program_id(0)
    lanes: tl.constexpr = rows * ROW
    end = tl.load(ends + block)
    tl.store(body + block, end)
    first, stop = tl.load(starts + block), tl.load(starts + block + 1)
    count = stop - first
    if count > 0:
        length, begin = tl.load(cut.length + block), tl.load(cut.begin + block)
        code_bits: tl.constexpr = 1 if hybrid else 3
        k = low_bits(length, count)
        order = tl.load(orders + tl.load(cut.tensor + block))
        payload = body + n_blocks + tl.load(ends + block - 1, mask=block > 0, other=0)
        low = count_bits(length)
        tl.atomic_or(payload, count - 1, sem="relaxed")
        code_plane = low + count * k
        unary = code_plane + count * code_bits
        for start in tl.range(first, stop, lanes):  # the unary plane has to end before the extra one can begin
            at = start + tl.arange(0, lanes)
            have = at < stop
            gap, code = elements(words, starts, counts, block, at, have, begin, n_chunks, chunk)
            ordinal = at - first
            deposit(payload, low + ordinal * k, gap & ((1 << k) - 1), ordinal * 0 + k, have, rows)
            kind = ordinal * 0
            if not hybrid:
                kind, _extra, _width = become(code & 7, order)
            signed = (code >> 3) | (kind << 1)
            deposit(payload, code_plane + ordinal * code_bits, signed, ordinal * 0 + code_bits, have, rows)
            length_bits = tl.where(have, (gap >> k) + 1, 0)
            deposit(payload, unary + tl.cumsum(length_bits) - 1, ordinal * 0 + 1, ordinal * 0 + 1, have, rows)
            unary += tl.sum(length_bits)
        if not hybrid:
            extra_plane = unary
            for start in tl.range(first, stop, lanes):
                at = start + tl.arange(0, lanes)
                have = at < stop
                code = tl.load(words + at, mask=have, other=0) >> 28
                _kind, extra, width = become(code & 7, order)
                width = tl.where(have, width, 0)
                deposit(payload, extra_plane + tl.cumsum(width) - width, extra, width, have, rows)
                extra_plane += tl.sum(width)


@triton.jit(do_not_specialize=["n_slots"])
def check_orders_kernel(orders, stride: tl.int64, broken, n_slots, hybrid: tl.constexpr):
    """Program (tensor, rank): a permutation and a shape bit; with tau 0."""
    slot, rank = tl.program_id(0), tl.program_id(1)
    order = tl.load(orders + rank * stride + slot)
    seen = 0
    for symbol in tl.static_range(8):
        seen |= 1 << ((order >> (3 * symbol)) & 7)
    good = (seen == 255) & ((order >> 25) == 0)
    if hybrid:
        good = order == 0
    if not good:
        tl.store(broken + rank, 1)


@triton.jit
def fetch(payload, position, width, n_bits, have):
    """The `width` <= 24 bits at `position` of a payload of n_bits, a multiple of 32; zeros outside."""
    inside = have & (position >= 0) & (position + width <= n_bits) & (width > 0)
    at = position >> 5
    low = tl.load(payload + at, mask=inside, other=0)
    high = tl.load(payload + at + 1, mask=inside & ((position & 31) + width > 32), other=0)
    pair = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    value = (pair >> (position & 31).to(tl.int64)).to(tl.int32)
    return tl.where(inside, value & ((1 << width) - 1), 0)


@triton.jit(do_not_specialize=["n_blocks", "n_payload"])
def directory_kernel(bodies, stride: tl.int64, cut, found, broken, n_blocks, n_payload, width: tl.constexpr):
    """Program (some blocks, rank): elements of each block, int32 [W, B]; 0 and broken where the directory lies."""
    rank = tl.program_id(1)
    body, block = bodies + rank * stride, tl.program_id(0) * width + tl.arange(0, width)
    ours = block < n_blocks
    end = tl.load(body + block, mask=ours, other=0)
    begin = tl.load(body + block - 1, mask=ours & (block > 0), other=0)
    good = (begin >= 0) & (end >= begin) & (end <= n_payload)
    length = tl.load(cut.length + block, mask=ours, other=1)
    filled = ours & good & (end > begin)
    word = tl.load(body + n_blocks + begin, mask=filled, other=0)
    count = tl.where(filled, (word & ((1 << count_bits(length)) - 1)) + 1, 0)
    good &= count <= length
    tl.store(found + rank * n_blocks + block, tl.where(good, count, 0), mask=ours)
    if tl.max((ours & (good == 0)).to(tl.int32)) != 0:
        tl.store(broken + rank, 1)


@triton.jit(do_not_specialize=["n_blocks", "n_words"])
def tail_kernel(bodies, stride: tl.int64, broken, n_blocks, n_words, width: tl.constexpr):
    """Program (part of a body, rank): nothing behind the last payload."""
    rank = tl.program_id(1)
    body, at = bodies + rank * stride, tl.program_id(0) * width + tl.arange(0, width)
    last = tl.load(body + n_blocks - 1, mask=n_blocks > 0, other=0)
    if (last >= 0) & (tl.program_id(0) * width + width > n_blocks + last):
        word = tl.load(body + at, mask=(at < n_words) & (at >= n_blocks + last), other=0)
        if tl.max((word != 0).to(tl.int32)) != 0:
            tl.store(broken + rank, 1)

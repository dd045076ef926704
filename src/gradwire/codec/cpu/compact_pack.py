"""Packing the compact format, compiled by Numba: the loops behind `compact_cpu.pack`.

Words are written through int64: all fields are at most 32 bits wide, so a shifted field never meets the sign.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"
# mypy does not know what a compiled function takes.

from __future__ import annotations

import numpy as np

from gradwire.codec.compact import EXTRA_BITS, FIRST_SYMBOL, SKEWED, SYMBOL_CLASS
from gradwire.compile.machine_code import Array, compiled

CLASS, FIRST, EXTRA = np.array(SYMBOL_CLASS), np.array(FIRST_SYMBOL), np.array(EXTRA_BITS)


@compiled
def low_bits(length: int, count: int) -> int:
    """k = floor(log2((L - c) / c)), 0 where L < 2c."""
    ratio, bits = (length - count) // count, 0
    while ratio > 1:
        ratio >>= 1
        bits += 1
    return bits


@compiled
def survey(
    start: int, stop: int, places: Array, codes: Array, begin: Array, length: Array, first: Array, stats: Array
) -> None:
    """Of the blocks start .. stop - 1, whose elements begin at first [B + 1], fills in stats [B, 10]:

    how often each d comes; zeros of the unary plane, -1 where a place is out of order or outside the block or a code
    is none; k.
    """
    for b in range(start, stop):
        low, high = first[b], first[b + 1]
        if high > low:
            stats[b, 9] = low_bits(length[b], min(high - low, length[b]))
            stats[b, 8] = _survey_block(places, codes, low, high, begin[b], length[b], stats[b, 9], stats[b])


@compiled
def _survey_block(
    places: Array, codes: Array, low: int, high: int, begin: int, length: int, bits: int, stats: Array
) -> int:
    """Counts the codes of one block into `stats` and returns the zeros of its unary plane; -1: places out of order."""
    zeros, bad = 0, 0
    before = begin - 1
    for i in range(low, high):
        gap = places[i] - before - 1
        bad |= gap | codes[i] | (15 - codes[i])  # a negative one sets the sign
        zeros += gap >> bits
        before = places[i]
    bad |= begin + length - 1 - before
    if bad < 0:
        return -1
    for part in range(low, high, 255):  # eight counters of eight bits in one register: twice as fast as an array
        counters = 0
        for i in range(part, min(part + 255, high)):
            counters += 1 << (codes[i] & 7) * 8
        for d in range(8):
            stats[d] += counters >> d * 8 & 255
    return zeros


@compiled
def choose(stats: Array, tensor: Array, capacity: Array, hybrid: bool) -> tuple[int, Array, Array]:
    """What cannot be sent (a number of UNSENDABLE), the orders, int32 [K], and what each code becomes, int64 [K, 16]:
    sign and class, the extra bits << 3, their number << 5."""
    frequency = np.zeros((len(capacity), 8), np.int64)
    orders, becomes = np.zeros(len(capacity), np.int32), np.zeros((len(capacity), 16), np.int64)
    for b in range(len(stats)):
        if stats[b, 8] < 0:
            return 1, orders, becomes
        frequency[tensor[b]] += stats[b, :8]
    for k in range(len(capacity)):
        sent = np.sum(frequency[k])
        if sent > capacity[k]:
            return 2, orders, becomes
        if not hybrid:
            orders[k] = _order(frequency[k], becomes[k])
        elif sent > frequency[k, 0]:
            return 3, orders, becomes
        else:
            becomes[k, 8] = 1
    return 0, orders, becomes


@compiled
def _order(frequency: Array, becomes: Array) -> int:
    """One tensor's order word; fills in what its codes become."""
    order = np.arange(8)
    for d in range(1, 8):  # by insertion: ties keep the smaller d first
        for at in range(d, 0, -1):
            if frequency[order[at]] > frequency[order[at - 1]]:
                order[at], order[at - 1] = order[at - 1], order[at]
    even, skewed = 0, 0
    for symbol in range(8):
        even += frequency[order[symbol]] * EXTRA[0, CLASS[0, symbol]]
        skewed += frequency[order[symbol]] * EXTRA[1, CLASS[1, symbol]]
    shape = 1 if skewed < even else 0
    word = SKEWED * shape
    for symbol in range(8):
        word |= order[symbol] << 3 * symbol
        kind = CLASS[shape, symbol]
        become = kind << 1 | (symbol - FIRST[shape, kind]) << 3 | EXTRA[shape, kind] << 5
        becomes[order[symbol]], becomes[order[symbol] + 8] = become, become | 1
    return word


@compiled
def write_directory(
    words: Array,
    first: Array,
    stats: Array,
    becomes: Array,
    count_bits: Array,
    entry: Array,
    tensor: Array,
    code_bits: int,
) -> Array:
    """The words of each payload, in the bits from entry [B] on. Returns where the payloads begin and end, [B + 1]."""
    ends = np.zeros(len(stats) + 1, np.int64)
    for b in range(len(stats)):
        count, extra, size = first[b + 1] - first[b], 0, 0
        for d in range(8):
            extra += stats[b, d] * (becomes[tensor[b], d] >> 5)
        if count:
            size = (count_bits[b] + count * (stats[b, 9] + code_bits + 1) + stats[b, 8] + extra + 31) >> 5
            at, shifted = entry[b] >> 5, size << (entry[b] & 31)
            words[at] |= shifted
            if shifted >> 32:
                words[at + 1] |= shifted >> 32
        ends[b + 1] = ends[b] + size
    return ends


@compiled
def write(
    start: int,
    stop: int,
    words: Array,
    places: Array,
    codes: Array,
    begin: Array,
    count_bits: Array,
    tensor: Array,
    first: Array,
    ends: Array,
    stats: Array,
    becomes: Array,
    code_bits: int,
) -> None:
    """The payloads of the blocks start .. stop - 1, into the payload area."""
    for b in range(start, stop):
        low, high = first[b], first[b + 1]
        if high > low:
            rule = (count_bits[b], stats[b, 9], becomes[tensor[b]], code_bits)
            _write_block(words[ends[b] : ends[b + 1]], places[low:high], codes[low:high], begin[b], *rule)


@compiled
def _write_block(
    payload: Array,
    places: Array,
    codes: Array,
    begin: int,
    count_bits: int,
    low_bits: int,
    becomes: Array,
    code_bits: int,
) -> None:
    """Count and four planes through one accumulator: `fill` bits of it are not yet written."""
    at, accumulator, fill = 0, len(places) - 1, count_bits
    if low_bits:
        at, accumulator, fill = _put_low(payload, places, begin, low_bits, at, accumulator, fill)
    at, accumulator, fill = _put_codes(payload, codes, becomes, code_bits, at, accumulator, fill)
    at, accumulator, fill = _put_unary(payload, places, begin, low_bits, at, accumulator, fill)
    at, accumulator, fill = _put_extra(payload, codes, becomes, at, accumulator, fill)
    if fill:
        payload[at] = accumulator
        if fill > 32:
            payload[at + 1] = accumulator >> 32


@compiled
def _put_low(
    payload: Array, places: Array, begin: int, low_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    before, mask = begin - 1, (1 << low_bits) - 1
    for i in range(len(places)):
        accumulator |= (places[i] - before - 1 & mask) << fill
        before = places[i]
        fill += low_bits
        if fill >= 32:
            payload[at] = accumulator
            at, accumulator, fill = at + 1, accumulator >> 32, fill - 32
    return at, accumulator, fill


@compiled
def _put_codes(
    payload: Array, codes: Array, becomes: Array, code_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    mask = (1 << code_bits) - 1
    for i in range(len(codes)):
        accumulator |= (becomes[codes[i]] & mask) << fill
        fill += code_bits
        if fill >= 32:
            payload[at] = accumulator
            at, accumulator, fill = at + 1, accumulator >> 32, fill - 32
    return at, accumulator, fill


@compiled
def _put_unary(
    payload: Array, places: Array, begin: int, low_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    """Leaves up to 32 bits in the accumulator."""
    before = begin - 1
    for i in range(len(places)):
        fill += places[i] - before - 1 >> low_bits
        before = places[i]
        while fill >= 32:
            payload[at] = accumulator
            at, accumulator, fill = at + 1, 0, fill - 32
        accumulator |= 1 << fill
        fill += 1
    return at, accumulator, fill


@compiled
def _put_extra(
    payload: Array, codes: Array, becomes: Array, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    """Takes up to 32 bits in the accumulator and leaves up to 33."""
    for i in range(len(codes)):
        if fill >= 32:
            payload[at] = accumulator
            at, accumulator, fill = at + 1, accumulator >> 32, fill - 32
        become = becomes[codes[i]]
        accumulator |= (become >> 3 & 3) << fill
        fill += become >> 5
    return at, accumulator, fill

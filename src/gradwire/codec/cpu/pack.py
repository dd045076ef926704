"""The compact format on a CPU: what is sent goes into the body, block by block, as compact.py defines it.

Machine code by Numba. One core of an EPYC (Zen 4, 2.6 GHz) packs 130 to 160 million elements a second
(benchmarks/wire_bits.py). What is given is not checked: encode.py and AdaComp choose it themselves.
Words are written through int64: all fields are at most 32 bits wide, so a shifted field never meets the sign.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"
# mypy does not know what a compiled function takes.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.compact import EXTRA_BITS, FIRST_SYMBOL, SKEWED, SYMBOL_CLASS
from gradwire.codec.form import Blocks
from gradwire.codec.words import PLACE
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import SMALL, shared

CLASS, FIRST, EXTRA = np.array(SYMBOL_CLASS), np.array(FIRST_SYMBOL), np.array(EXTRA_BITS)
CODE = np.uint32(28)  # where it lies in a word; unsigned, as an index of a table is then not tested for its sign


@machine_code
def low_bits(length: int, count: int) -> int:
    """k = floor(log2((L - c) / c)), 0 where L < 2c."""
    ratio, bits = (length - count) // count, 0
    while ratio > 1:
        ratio >>= 1
        bits += 1
    return bits


@machine_code
def locate(geometry: Array, words: Array, counts: Array, chunk: int) -> Array:
    """Which word is each block's first, int64 [B + 1]. words: those of the chunks, one after another."""
    first, piece, low, stop = np.zeros(geometry.shape[1] + 1, np.int64), 0, 0, counts[0]
    for b in range(geometry.shape[1]):
        while geometry[0, b] >= (piece + 1) * chunk:
            piece, low = piece + 1, stop
            stop += counts[piece]
        high, place = stop if b == 0 else min(stop, low + geometry[1, b - 1]), geometry[0, b] - piece * chunk
        while low < high:
            middle = (low + high) // 2
            if words[middle] & PLACE < place:
                low = middle + 1
            else:
                high = middle
        first[b] = low
    first[-1] = counts.sum()
    return first


@machine_code
def elements(b: int, geometry: Array, words: Array, counts: Array, chunk: int, first: Array) -> tuple[Array, int]:
    """The words of a block, and what their places count from: their chunk's begin, or of several chunks the block's."""
    mine, begin = words[first[b] : first[b + 1]], geometry[0, b]
    piece = begin // chunk
    if begin + geometry[1, b] <= (piece + 1) * chunk:
        return mine, piece * chunk
    moved, end = mine.copy(), counts[: piece + 1].sum()
    for i in range(len(moved)):
        while first[b] + i >= end:
            piece += 1
            end += counts[piece]
        moved[i] += np.uint32(piece * chunk - begin)
    return moved, begin


@machine_code
def survey(
    start: int, stop: int, geometry: Array, words: Array, counts: Array, chunk: int, first: Array, stats: Array
) -> None:
    """Of the blocks start .. stop - 1 fills in stats [B, 11]:

    how often each d comes; zeros of the unary plane; k; how many elements.
    """
    for b in range(start, stop):
        mine, origin = elements(b, geometry, words, counts, chunk, first)
        stats[b, 10] = len(mine)
        if len(mine):
            stats[b, 9] = bits = low_bits(geometry[1, b], len(mine))
            before, zeros = geometry[0, b] - origin - 1, 0
            for i in range(len(mine)):
                place = mine[i] & PLACE
                zeros += place - before - 1 >> bits
                before = place
            stats[b, 8] = zeros
            for part in range(0, len(mine), 255):  # eight counters of eight bits in one register: twice as fast
                counters = 0
                for i in range(part, min(part + 255, len(mine))):
                    counters += 1 << (mine[i] >> 28 & 7) * 8
                for d in range(8):
                    stats[b, d] += counters >> d * 8 & 255


@machine_code
def choose(stats: Array, tensor: Array, n_tensors: int, hybrid: bool) -> tuple[Array, Array]:
    """The orders, int32 [K], and what each code becomes, int64 [K, 16]: sign and class, the extra bits << 3, their
    number << 5."""
    frequency = np.zeros((n_tensors, 8), np.int64)
    orders, becomes = np.zeros(n_tensors, np.int32), np.zeros((n_tensors, 16), np.int64)
    for b in range(len(stats)):
        frequency[tensor[b]] += stats[b, :8]
    for k in range(n_tensors):
        if hybrid:
            becomes[k, 8] = 1
        else:
            orders[k] = _order(frequency[k], becomes[k])
    return orders, becomes


@machine_code
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


@machine_code
def write_directory(words: Array, stats: Array, becomes: Array, geometry: Array, code_bits: int) -> Array:
    """The words of each payload, in the bits of its entry. Returns where the payloads begin and end, [B + 1]."""
    _, _, count_bits, entry, _, tensor = geometry
    ends = np.zeros(len(stats) + 1, np.int64)
    for b in range(len(stats)):
        count, extra, size = stats[b, 10], 0, 0
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


@machine_code
def write_payloads(
    start: int,
    stop: int,
    geometry: Array,
    words: Array,
    counts: Array,
    chunk: int,
    first: Array,
    stats: Array,
    payloads: Array,
    ends: Array,
    becomes: Array,
    code_bits: int,
) -> None:
    """The payloads of the blocks start .. stop - 1, into the payload area."""
    for b in range(start, stop):
        if stats[b, 10]:
            mine, origin = elements(b, geometry, words, counts, chunk, first)
            rule = (geometry[2, b], stats[b, 9], becomes[geometry[5, b]], code_bits)
            _write_block(payloads[ends[b] : ends[b + 1]], mine, geometry[0, b] - origin, *rule)


@machine_code
def _write_block(
    payload: Array, words: Array, begin: int, count_bits: int, low_bits: int, becomes: Array, code_bits: int
) -> None:
    """Count and four planes through one accumulator: `fill` bits of it are not yet written."""
    at, accumulator, fill = 0, len(words) - 1, count_bits
    if low_bits:
        at, accumulator, fill = _put_low(payload, words, begin, low_bits, at, accumulator, fill)
    at, accumulator, fill = _put_codes(payload, words, becomes, code_bits, at, accumulator, fill)
    at, accumulator, fill = _put_unary(payload, words, begin, low_bits, at, accumulator, fill)
    at, accumulator, fill = _put_extra(payload, words, becomes, at, accumulator, fill)
    if fill:
        payload[at] = accumulator
        if fill > 32:
            payload[at + 1] = accumulator >> 32


@machine_code
def _emptied(payload: Array, at: int, accumulator: int, fill: int) -> tuple[int, int, int]:
    """Writes the accumulator's lower word if it is full."""
    if fill < 32:
        return at, accumulator, fill
    payload[at] = accumulator
    return at + 1, accumulator >> 32, fill - 32


@machine_code
def _put_low(
    payload: Array, words: Array, begin: int, low_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    before, mask = begin - 1, (1 << low_bits) - 1
    for i in range(len(words)):
        place = words[i] & PLACE
        accumulator |= (place - before - 1 & mask) << fill
        before = place
        at, accumulator, fill = _emptied(payload, at, accumulator, fill + low_bits)
    return at, accumulator, fill


@machine_code
def _put_codes(
    payload: Array, words: Array, becomes: Array, code_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    mask = (1 << code_bits) - 1
    for i in range(len(words)):
        accumulator |= (becomes[words[i] >> CODE] & mask) << fill
        at, accumulator, fill = _emptied(payload, at, accumulator, fill + code_bits)
    return at, accumulator, fill


@machine_code
def _put_unary(
    payload: Array, words: Array, begin: int, low_bits: int, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    """Leaves up to 32 bits in the accumulator."""
    before = begin - 1
    for i in range(len(words)):
        place = words[i] & PLACE
        fill += place - before - 1 >> low_bits
        before = place
        while fill >= 32:
            payload[at] = accumulator
            at, accumulator, fill = at + 1, 0, fill - 32
        accumulator |= 1 << fill
        fill += 1
    return at, accumulator, fill


@machine_code
def _put_extra(
    payload: Array, words: Array, becomes: Array, at: int, accumulator: int, fill: int
) -> tuple[int, int, int]:
    """Takes up to 32 bits in the accumulator and leaves up to 33."""
    for i in range(len(words)):
        at, accumulator, fill = _emptied(payload, at, accumulator, fill)
        become = becomes[words[i] >> CODE]
        accumulator |= (become >> 3 & 3) << fill
        fill += become >> 5
    return at, accumulator, fill


def write(words: Array, counts: Array, chunk: int, blocks: Blocks, body: Array) -> Array:
    """Writes the body, int32 [blocks.words], zeros until now; returns the orders, int32 [K]."""
    geometry, capacity = blocks.arrays
    code_bits, n_words, out = 1 if blocks.hybrid else 3, int(counts.sum()), body.view(np.uint32)
    stats, parts = np.zeros((blocks.count, 11), np.int64), [(0, blocks.count)]
    if body.size > SMALL // 4 and torch.get_num_threads() > 1:
        n_parts = max(1, min(torch.get_num_threads(), n_words // SMALL))
        parts = [(blocks.count * part // n_parts, blocks.count * (part + 1) // n_parts) for part in range(n_parts)]
    given = (geometry, words.view(np.uint32), counts, chunk)
    common = (*given, locate(*given), stats)
    _each(parts, survey, *common)
    orders, becomes = choose(stats, geometry[5], len(capacity), blocks.hybrid)
    ends = write_directory(out, stats, becomes, geometry, code_bits)
    assert ends[-1] <= blocks.payload_words, "room_words proves that this cannot be; machine code would write beyond"
    _each(parts, write_payloads, *common, out[blocks.directory_words :], ends, becomes, code_bits)
    return np.asarray(orders)


def _each(parts: list[tuple[int, int]], function: Callable[..., None], *args: object) -> None:
    """function(start, stop, ...) for some blocks each; they have about as many elements."""
    if len(parts) == 1:
        function(*parts[0], *args)
    else:
        shared(parts, function, *args)


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`."""
    body = np.zeros(blocks.words, np.int32)
    return torch.from_numpy(write(words.numpy(), counts.numpy(), chunk, blocks, body)), torch.from_numpy(body)

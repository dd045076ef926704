"""The compact format on a CPU: what is sent goes into the body, block by block, as compact.py defines it.

Machine code by Numba. One core of an EPYC (Zen 4, 2.6 GHz) packs 130 to 160 million elements a second
(benchmarks/wire_bits.py). What is given is not checked: encode.py and AdaComp choose it themselves.
Words are written through int64: all fields are at most 32 bits wide, so a shifted field never meets the sign.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"
# mypy does not know what a compiled function takes.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.compact import EXTRA_BITS, FIRST_SYMBOL, SKEWED, SYMBOL_CLASS
from gradwire.codec.form import Blocks
from gradwire.codec.words import PLACE
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import SMALL, shared

CLASS, FIRST, EXTRA = np.array(SYMBOL_CLASS), np.array(FIRST_SYMBOL), np.array(EXTRA_BITS)


class Lists(NamedTuple):
    """What is sent, in ascending order, as S lists: the elements of list s are at offsets[s] .. + counts[s] - 1."""

    begins: Array  # int64 [S], the flat place from which the places of a list count
    offsets: Array  # int64 [S]
    counts: Array  # int64 [S]
    places: Array  # int32
    codes: Array  # uint8, sign << 3 | d


@machine_code
def low_bits(length: int, count: int) -> int:
    """k = floor(log2((L - c) / c)), 0 where L < 2c."""
    ratio, bits = (length - count) // count, 0
    while ratio > 1:
        ratio >>= 1
        bits += 1
    return bits


@machine_code
def locate(begin: Array, lists: Lists) -> tuple[Array, Array]:
    """In which list each block's elements begin, and at which of it; int64 [B + 1] each."""
    owner, at = np.zeros(len(begin) + 1, np.int64), np.zeros(len(begin) + 1, np.int64)
    last, s = len(lists.begins) - 1, 0
    for b in range(len(begin)):
        while s < last and lists.begins[s + 1] <= begin[b]:
            s += 1
        low, high, place = 0, lists.counts[s], begin[b] - lists.begins[s]
        while low < high:
            middle = (low + high) // 2
            if lists.places[lists.offsets[s] + middle] < place:
                low = middle + 1
            else:
                high = middle
        owner[b], at[b] = s, low
    if last >= 0:
        owner[-1], at[-1] = last, lists.counts[last]
    return owner, at


@machine_code
def elements(b: int, owner: Array, at: Array, lists: Lists) -> tuple[Array, Array, int]:
    """Places and codes of a block, and what its places count from. Views, but where it lies in several lists."""
    first, last, end = owner[b], owner[b + 1], at[b + 1]
    while last > first and end == 0:
        last -= 1
        end = lists.counts[last]
    if first == last:
        here = slice(lists.offsets[first] + at[b], lists.offsets[first] + end)
        return lists.places[here], lists.codes[here], lists.begins[first]
    n_elements = end - at[b]
    for s in range(first, last):
        n_elements += lists.counts[s]
    places, codes, to = np.empty(n_elements, np.int32), np.empty(n_elements, np.uint8), 0
    for s in range(first, last + 1):
        for i in range(at[b] if s == first else 0, end if s == last else lists.counts[s]):
            places[to] = lists.places[lists.offsets[s] + i] + lists.begins[s] - lists.begins[first]
            codes[to] = lists.codes[lists.offsets[s] + i]
            to += 1
    return places, codes, lists.begins[first]


@machine_code
def survey(start: int, stop: int, geometry: Array, lists: Lists, owner: Array, at: Array, stats: Array) -> None:
    """Of the blocks start .. stop - 1 fills in stats [B, 11]:

    how often each d comes; zeros of the unary plane; k; how many elements.
    """
    for b in range(start, stop):
        places, codes, origin = elements(b, owner, at, lists)
        stats[b, 10] = len(places)
        if len(places):
            stats[b, 9] = bits = low_bits(geometry[1, b], len(places))
            before, zeros = geometry[0, b] - origin - 1, 0
            for i in range(len(places)):
                zeros += places[i] - before - 1 >> bits
                before = places[i]
            stats[b, 8] = zeros
            for part in range(0, len(codes), 255):  # eight counters of eight bits in one register: twice as fast
                counters = 0
                for i in range(part, min(part + 255, len(codes))):
                    counters += 1 << (codes[i] & 7) * 8
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
    lists: Lists,
    owner: Array,
    at: Array,
    stats: Array,
    words: Array,
    ends: Array,
    becomes: Array,
    code_bits: int,
) -> None:
    """The payloads of the blocks start .. stop - 1, into the payload area."""
    for b in range(start, stop):
        if stats[b, 10]:
            places, codes, origin = elements(b, owner, at, lists)
            rule = (geometry[2, b], stats[b, 9], becomes[geometry[5, b]], code_bits)
            _write_block(words[ends[b] : ends[b + 1]], places, codes, geometry[0, b] - origin, *rule)


@machine_code
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


@machine_code
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


@machine_code
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


@machine_code
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


@machine_code
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


def write(lists: Lists, blocks: Blocks, body: Array) -> Array:
    """Writes the body, int32 [blocks.words], zeros until now; returns the orders, int32 [K]."""
    geometry, capacity = blocks.arrays
    code_bits, words = 1 if blocks.hybrid else 3, body.view(np.uint32)
    stats, parts = np.zeros((blocks.count, 11), np.int64), [(0, blocks.count)]
    if body.size > SMALL // 4 and torch.get_num_threads() > 1:
        n_parts = max(1, min(torch.get_num_threads(), int(lists.counts.sum()) // SMALL))
        parts = [(blocks.count * part // n_parts, blocks.count * (part + 1) // n_parts) for part in range(n_parts)]
    common = (geometry, lists, *locate(geometry[0], lists), stats)
    _each(parts, survey, *common)
    orders, becomes = choose(stats, geometry[5], len(capacity), blocks.hybrid)
    ends = write_directory(words, stats, becomes, geometry, code_bits)
    assert ends[-1] <= blocks.payload_words, "room_words proves that this cannot be; machine code would write beyond"
    _each(parts, write_payloads, *common, words[blocks.directory_words :], ends, becomes, code_bits)
    return np.asarray(orders)


def _each(parts: list[tuple[int, int]], function: Callable[..., None], *args: object) -> None:
    """function(start, stop, ...) for some blocks each; they have about as many elements."""
    if len(parts) == 1:
        function(*parts[0], *args)
    else:
        shared(parts, function, *args)


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`; the words of a chunk are a list."""
    each = counts.numpy().astype(np.int64)
    given = words.numpy()[: each.sum()]
    places, signs = given & np.int32(PLACE), (given >> 28 & 15).astype(np.uint8)
    lists = Lists(np.arange(len(each)) * chunk, each.cumsum() - each, each, places, signs)
    body = np.zeros(blocks.words, np.int32)
    return torch.from_numpy(write(lists, blocks, body)), torch.from_numpy(body)

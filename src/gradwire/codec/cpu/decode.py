"""Step 6 on the CPU, from messages to their mean: they are looked through, read, and added. Machine code.

A message in the compact format becomes one record of 32 bits an element, those of words.py: since the sum goes tile by
tile over all ranks, every element must lie ready, and none may be added before all of them are known to be right.
Nothing is believed. The words of a body have two to spare at the end, because a field is read from two, and an empty
one may begin behind the last. One core of an EPYC (Zen 4, 2.6 GHz) reads 175 million elements a second.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, call-arg"
# mypy does not know what a compiled function takes.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.cpu.decide import ZERO
from gradwire.codec.cpu.head import inspect
from gradwire.codec.cpu.pack import low_bits
from gradwire.codec.form import Blocks, Shape
from gradwire.codec.interface import PROBLEMS, Rule
from gradwire.compile.machine_code import Array, machine_code, trailing_zeros
from gradwire.compile.threads import SMALL, equal_parts, shared
from gradwire.layout import Layout

Int = Any  # an int64 of machine code: Python's or NumPy's
WIDTHS = (0x1111, 0x2100)  # EXTRA_BITS and FIRST_SYMBOL of compact.py, four bits a class: no table to load from
FIRSTS = (0x6420, 0x4210)
LEAST = -126  # the exponent below which float32 is denormal
CACHED = 1 << 16  # elements of a result that stay in the second-level cache while all ranks' words are added to them


class Sizes(NamedTuple):
    """Of a body, in words but for the first, and whether its codes are signs only."""

    directory_bits: int
    directory_words: int
    payload_words: int
    hybrid: bool


@machine_code
def _fetch(words: Array, position: Int, width: Int) -> Int:
    """The `width` < 32 bits at `position`."""
    at = np.uint64(position >> 5)  # unsigned: no look whether it counts from the end
    pair = np.int64(words[at]) | np.int64(words[at + np.uint64(1)]) << 32
    return pair >> (position & 31) & ((1 << width) - 1)


@machine_code
def orders_hold(orders: Array, hybrid: bool) -> bool:
    """Whether every order is a permutation and a shape bit, with tau 0."""
    for order in orders:
        seen = 0
        for symbol in range(8):
            seen |= 1 << (order >> 3 * symbol & 7)
        if order != 0 if hybrid else (seen != 255 or order >> 25 != 0):
            return False
    return True


@machine_code
def read_directory(words: Array, geometry: Array, capacity: Array, sizes: Sizes) -> tuple[bool, Array, Array]:
    """Whether it can be; where each block's elements begin among all, and its payload among all; int64 [B + 1] each."""
    _, length, count_bits, entry, entry_bits, tensor = geometry
    first, ends = np.zeros(len(length) + 1, np.int64), np.zeros(len(length) + 1, np.int64)
    left = capacity.copy()
    for b in range(len(length)):
        count: Int = 0
        size: Int = _fetch(words, entry[b], entry_bits[b])
        ends[b + 1] = ends[b] + size
        if ends[b + 1] > sizes.payload_words:
            return False, first, ends
        if size:
            count = _fetch(words, (sizes.directory_words + ends[b]) * 32, count_bits[b]) + 1
            left[tensor[b]] -= count
            if count > length[b] or left[tensor[b]] < 0:
                return False, first, ends
        first[b + 1] = first[b] + count
    return True, first, ends


@machine_code
def _read_places(
    words: Array, elements: Array, begin: Int, length: Int, low: Int, low_bits: Int, unary: Int, stop: Int
) -> Int:
    """Decodes a block's places; the end of its unary plane, or 0: they are no places of it."""
    at = unary >> 5
    ahead = np.int64(words[at]) >> (unary & 31) << (unary & 31)
    origin = at * 32 - unary  # of the bit string's word, from the plane's start
    total, i = begin - 1, 0
    while True:
        while ahead:
            one: Int = trailing_zeros(ahead)
            ahead &= ahead - 1
            total += _fetch(words, low, low_bits) + 1
            low += low_bits
            place: Int = total + (origin + one - i << low_bits)
            elements[i] = np.uint32(place)
            i += 1
            if i == len(elements):
                return at * 32 + one + 1 if place < begin + length else 0
        at += 1
        if at * 32 >= stop:
            return 0
        ahead = np.int64(words[at])
        origin += 32


@machine_code
def _read_codes(words: Array, elements: Array, plane: Int, extra: Int, stop: Int, order: Int) -> Int:
    """Decodes a block's codes, whose extra bits begin at `extra`; where they end, beyond `stop` if they do not fit."""
    widths, firsts = (WIDTHS[1], FIRSTS[1]) if order >> 24 else (WIDTHS[0], FIRSTS[0])
    for i in range(len(elements)):
        sign_class = _fetch(words, plane + 3 * i, 3)
        nibble = (sign_class >> 1) * 4
        width = widths >> nibble & 15
        if extra + width > stop:
            return stop + 1
        symbol = (firsts >> nibble & 15) + _fetch(words, extra, width)
        extra += width
        elements[i] |= np.uint32((sign_class & 1) << 31 | (order >> 3 * symbol & 7) << 28)
    return extra


@machine_code
def _read_signs(words: Array, elements: Array, plane: Int) -> None:
    for i in range(len(elements)):
        elements[i] |= np.uint32(_fetch(words, plane + i, 1) << 31)


@machine_code
def bits_behind(words: Array, position: Int) -> bool:
    """Whether the word that `position` lies in has bits from there on; none if a word begins there."""
    return bool(position & 31) and bool(np.int64(words[position >> 5]) >> (position & 31))


@machine_code
def _ends_well(words: Array, end: Int, stop: Int) -> bool:
    """Every payload ends in its last word, and there is nothing behind it."""
    return end <= stop and end > stop - 32 and not bits_behind(words, end)


@machine_code
def _within_chunks(elements: Array, chunk: int, first: Int, counts: Array) -> None:
    """Places that count from chunk `first` on become places within their chunks, of which there may be several."""
    for i in range(len(elements)):
        further = elements[i] // chunk
        elements[i] -= np.uint32(further * chunk)
        counts[first + further] += 1


@machine_code
def _has_small(elements: Array, exponent: Int) -> bool:
    """Whether one stands for less than float32 can say."""
    found = False
    for i in range(len(elements)):
        found |= exponent - np.int64(elements[i] >> 28 & 7) < LEAST
    return found


@machine_code
def read_message(
    body: Array,
    orders: Array,
    exponents: Array,
    geometry: Array,
    capacity: Array,
    sizes: Sizes,
    chunk: int,
    records: Array,
    counts: Array,
) -> tuple[bool, bool]:
    """Writes the records of one message, and how many each chunk has: (whether it is right, an exponent too small)."""
    words, small = np.zeros(len(body) + 2, np.uint32), False
    words[:-2] = body
    good, first, ends = read_directory(words, geometry, capacity, sizes)
    payloads = words[sizes.directory_words :]
    if not good or not orders_hold(orders, sizes.hybrid) or bits_behind(words, sizes.directory_bits):
        return False, False
    for b in range(len(ends) - 1):
        elements, end, slot = records[first[b] : first[b + 1]], ends[b + 1] * 32, geometry[5, b]
        if not len(elements):
            continue
        width, low = low_bits(geometry[1, b], len(elements)), ends[b] * 32 + geometry[2, b]
        codes = low + len(elements) * width
        unary = codes + len(elements) * (1 if sizes.hybrid else 3)
        if unary + len(elements) > end:
            return False, False
        piece = geometry[0, b] // chunk
        origin = geometry[0, b] - piece * chunk
        extra: Int = _read_places(payloads, elements, origin, geometry[1, b], low, width, unary, end)
        if extra == 0:
            return False, False
        if origin + geometry[1, b] > chunk:
            _within_chunks(elements, chunk, piece, counts)
        else:
            counts[piece] += len(elements)
        if sizes.hybrid:
            _read_signs(payloads, elements, codes)
        else:
            extra = _read_codes(payloads, elements, codes, extra, end, np.int64(orders[slot]))
            if exponents[slot] - 7 < LEAST:
                small |= _has_small(elements, exponents[slot])
        if not _ends_well(payloads, extra, end):
            return False, False
    return not payloads[ends[-1] :].any(), small


@machine_code
def read_messages(
    first: int,
    last: int,
    bodies: Array,
    orders: Array,
    sound: Array,
    exponents: Array,
    geometry: Array,
    capacity: Array,
    sizes: Sizes,
    chunk: int,
    records: Array,
    counts: Array,
    broken: Array,
    small: Array,
) -> None:
    """Those of ranks first .. last - 1 that are sound; [W] broken: they hold what does not belong there."""
    for rank in range(first, last):
        if sound[rank]:
            given = (bodies[rank], orders[rank], exponents[rank], geometry, capacity, sizes, chunk)
            good, too_small = read_message(*given, records[rank], counts[rank])
            broken[rank], small[rank] = not good, good and too_small
            if not good:
                counts[rank] = 0


@machine_code
def check_words(
    rank: int, words: Array, counts: Array, ends: Array, exponents: Array, hybrid: bool, chunk: int, found: Array
) -> None:
    """found[rank] = (places outside or out of order, exponents too small); ends: of the tensors, ascending."""
    at, slot, numel = 0, 0, ends[-1] if len(ends) else 0
    for c in range(counts.shape[1]):
        previous = -1
        for _ in range(counts[rank, c]):
            place, code = words[rank, at] & 0x0FFFFFFF, words[rank, at] >> 28
            at += 1
            index = c * chunk + place
            if place <= previous or place >= chunk or index >= numel:
                found[rank, 0] = True
                return
            previous = place
            while index >= ends[slot]:
                slot += 1
            if not hybrid and exponents[rank, slot] - (code & 7) < LEAST:
                found[rank, 1] = True


@machine_code
def first_at_least(words: Array, rank: int, begin: int, end: int, place: int) -> int:
    """The first of words[rank, begin:end] whose place is not below `place`."""
    while begin < end:
        middle = (begin + end) // 2
        if (words[rank, middle] & 0x0FFFFFFF) < place:
            begin = middle + 1
        else:
            end = middle
    return begin


@machine_code
def add_run(
    words: Array,
    at: int,
    stop: int,
    end: int,
    base: int,
    slot: int,
    ends: Array,
    exponents: Array,
    tau: np.float32,
    share: np.float32,
    out: Array,
) -> tuple[int, int]:
    """out += one rank's words from `at` on whose place is below `end`; where it stopped, in which tensor."""
    one = np.empty(1, np.float32)
    bits = one.view(np.int32)
    while at < stop and (words[at] & 0x0FFFFFFF) < end:
        index, code = base + (words[at] & 0x0FFFFFFF), words[at] >> 28
        at += 1
        while index >= ends[slot]:
            slot += 1
        if tau > ZERO:
            one[0] = tau
        else:
            bits[0] = (exponents[slot] - (code & 7) + 127) << 23
        value = one[0] * share
        out[index] += -value if code & 8 else value
    return at, slot


@machine_code
def add_up(
    begin: int,
    end: int,
    words: Array,
    counts: Array,
    ends: Array,
    exponents: Array,
    tau: np.float32,
    share: np.float32,
    chunk: int,
    out: Array,
) -> None:
    """out[begin:end] = the mean over the ranks, in rank order; share: 1 / W.

    Tile by tile, all ranks: a tile goes through the cache once, a whole part would go through it once for every rank.
    """
    n_ranks = words.shape[0]
    first, at, slots = np.zeros(n_ranks, np.int64), np.empty(n_ranks, np.int64), np.empty(n_ranks, np.int64)
    for c in range(counts.shape[1]):
        base = c * chunk
        low, high = max(begin - base, 0), min(end - base, chunk)
        if low < high:
            for rank in range(n_ranks):
                at[rank] = first_at_least(words, rank, first[rank], first[rank] + counts[rank, c], low)
                slots[rank] = np.searchsorted(ends, base + low, side="right")
            for tile in range(low, high, CACHED):
                tile_end = min(tile + CACHED, high)
                out[base + tile : base + tile_end] = ZERO
                for rank in range(n_ranks):
                    where = (at[rank], first[rank] + counts[rank, c], tile_end, base, slots[rank])
                    at[rank], slots[rank] = add_run(words[rank], *where, ends, exponents[rank], tau, share, out)
        for rank in range(n_ranks):
            first[rank] += counts[rank, c]


def decode(messages: Tensor, shape: Shape, rule: Rule, step: int, out: Tensor) -> Tensor:
    """As `reference.decode`: nothing is added before all is known to be right."""
    problems, given, layout = inspect(messages, shape, step), messages.numpy(), shape.layout
    sound: Array = np.logical_not(problems.numpy().any(1))
    exponents = np.ascontiguousarray(given[:, shape.exponents]).view(np.int8)[:, : len(layout.slots)].astype(np.int32)
    n_broken = 0 if shape.blocks is None else 1
    found = np.zeros((len(given), n_broken + len(PROBLEMS)), np.bool_)
    words, counts = given[:, shape.body], given[:, shape.counts]
    if shape.blocks is None:
        _check(words, counts, sound, exponents, layout, rule, shape.chunk, found)
    else:
        read = (given[:, shape.orders], words, sound, exponents, shape.blocks, shape.chunk, found[:, 0], found[:, 2])
        words, counts = _read(*read)
    if sound.all() and not found.any():
        _add(words, counts, exponents, layout, rule, shape.chunk, out)
    return torch.cat([problems, torch.from_numpy(found)], 1)


def add(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor
) -> Tensor:
    """As `reference.add`."""
    found = np.zeros((len(words), len(PROBLEMS)), np.bool_)
    inputs = (words.numpy(), counts.numpy(), sound.numpy(), exponents.numpy())
    _check(*inputs, layout, rule, chunk, found)
    if inputs[2].all() and not found.any():
        _add(*inputs[:2], inputs[3], layout, rule, chunk, out)
    return torch.from_numpy(found)


def _check(
    words: Array, counts: Array, sound: Array, exponents: Array, layout: Layout, rule: Rule, chunk: int, found: Array
) -> None:
    """Looks for problems, one thread a rank."""
    ranks = [(int(rank),) for rank in np.flatnonzero(sound)]
    inputs = (words, counts, _ends(layout), exponents, rule.tau is not None, chunk, found)
    shared(ranks, check_words, *inputs, n_elements=words.size)


def _add(words: Array, counts: Array, exponents: Array, layout: Layout, rule: Rule, chunk: int, out: Tensor) -> None:
    """Every thread has its own part of `out`."""
    inputs = (words, counts, _ends(layout), exponents, np.float32(rule.tau or 0), np.float32(1 / len(words)), chunk)
    if layout.numel < 2 * SMALL:
        add_up(0, layout.numel, *inputs, out.numpy())
    else:
        shared(equal_parts(layout.numel, torch.get_num_threads()), add_up, *inputs, out.numpy())


def _ends(layout: Layout) -> Array:
    """Of the tensors, made once."""
    if _ends not in layout.kept:
        layout.kept[_ends] = np.array([slot.offset + slot.numel for slot in layout.slots], dtype=np.int64)
    known: Array = layout.kept[_ends]
    return known


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`."""
    broken, small = np.zeros((2, len(bodies)), np.bool_)
    any_exponents = np.zeros((len(bodies), len(blocks.layout)), np.int32)
    given = (orders.numpy(), bodies.numpy(), sound.numpy(), any_exponents)
    words, counts = _read(*given, blocks, chunk, broken, small)
    return torch.from_numpy(words), torch.from_numpy(counts), torch.from_numpy(broken)


def _read(
    orders: Array,
    bodies: Array,
    sound: Array,
    exponents: Array,
    blocks: Blocks,
    chunk: int,
    broken: Array,
    small: Array,
) -> tuple[Array, Array]:
    """Records [W, room] and counts [W, C], some ranks' messages a thread.

    No torch operation on long tensors: OpenMP's threads would wait for a busy backward.
    """
    n_ranks, n_chunks = len(bodies), max(1, -(-blocks.layout.numel // chunk))
    records, counts = np.empty((n_ranks, sum(blocks.capacity)), np.uint32), np.zeros((n_ranks, n_chunks), np.int32)
    sizes = Sizes(blocks.entries[-1], blocks.directory_words, blocks.payload_words, blocks.hybrid)
    inputs = (bodies, orders, sound, exponents, *blocks.arrays, sizes, chunk, records, counts, broken, small)
    n_parts = min(n_ranks, torch.get_num_threads()) if records.size >= SMALL else 1
    if n_parts == 1:
        read_messages(0, n_ranks, *inputs)
    else:
        parts = [(n_ranks * part // n_parts, n_ranks * (part + 1) // n_parts) for part in range(n_parts)]
        shared(parts, read_messages, *inputs)
    return records.view(np.int32), counts

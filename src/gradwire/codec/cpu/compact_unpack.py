"""Unpacking the compact format, compiled by Numba: the loops behind `compact_cpu.unpack`. Nothing is believed.

The words have two to spare at the end, because a field is read from two, and an empty one may begin behind the last.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, call-arg"
# mypy does not know what a compiled function takes.

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.codec.cpu.compact_pack import low_bits
from gradwire.compile.machine_code import Array, compiled, trailing_zeros

Int = Any  # an int64 of compiled code: Python's or NumPy's
WIDTHS = (0x1111, 0x2100)  # EXTRA_BITS and FIRST_SYMBOL of compact.py, four bits a class: no table to load from
FIRSTS = (0x6420, 0x4210)


@compiled
def _fetch(words: Array, position: Int, width: Int) -> Int:
    """The `width` < 32 bits at `position`."""
    at = position >> 5
    pair = np.int64(words[at]) | np.int64(words[at + 1]) << 32
    return pair >> (position & 31) & ((1 << width) - 1)


@compiled
def check_orders(orders: Array, hybrid: bool) -> Int:
    """1 if an order is no permutation and shape bit, with tau no 0."""
    for order in orders:
        seen = 0
        for symbol in range(8):
            seen |= 1 << (order >> 3 * symbol & 7)
        if order != 0 if hybrid else (seen != 255 or order >> 25 != 0):
            return 1
    return 0


@compiled
def read_directory(
    words: Array,
    entry: Array,
    entry_bits: Array,
    directory_words: int,
    length: Array,
    count_bits: Array,
    tensor: Array,
    capacity: Array,
    payload_words: int,
) -> tuple[Int, Array, Array]:
    """What is wrong; where each block's elements begin among all, and its payload among all; int64 [B + 1] each."""
    first, ends = np.zeros(len(length) + 1, np.int64), np.zeros(len(length) + 1, np.int64)
    left = capacity.copy()
    for b in range(len(length)):
        count: Int = 0
        size: Int = _fetch(words, entry[b], entry_bits[b])
        ends[b + 1] = ends[b] + size
        if ends[b + 1] > payload_words:
            return 2, first, ends
        if size:
            count = _fetch(words, (directory_words + ends[b]) * 32, count_bits[b]) + 1
            if count > length[b]:
                return 3, first, ends
            left[tensor[b]] -= count
            if left[tensor[b]] < 0:
                return 4, first, ends
        first[b + 1] = first[b] + count
    return 0, first, ends


@compiled
def read(
    start: int,
    stop: int,
    words: Array,
    index: Array,
    code: Array,
    begin: Array,
    length: Array,
    count_bits: Array,
    tensor: Array,
    first: Array,
    ends: Array,
    orders: Array,
    hybrid: bool,
    problems: Array,
) -> None:
    """Decodes the blocks start .. stop - 1 of the payload area; problems [B]: what is wrong with each."""
    for b in range(start, stop):
        count = first[b + 1] - first[b]
        if count:
            end = ends[b + 1] * 32
            width = low_bits(length[b], count)
            low = ends[b] * 32 + count_bits[b]
            code_plane = low + count * width
            unary = code_plane + count * (1 if hybrid else 3)
            places, codes = index[first[b] : first[b + 1]], code[first[b] : first[b + 1]]
            if unary + count > end:
                problems[b] = 5
                continue
            extra = _read_places(words, places, begin[b], length[b], low, width, unary, end)
            if extra < 0:
                problems[b] = -extra
                continue
            if hybrid:
                _read_signs(words, codes, code_plane)
            else:
                extra = _read_codes(words, codes, code_plane, extra, end, np.int64(orders[tensor[b]]))
            problems[b] = _check_end(words, extra, end)


@compiled
def _read_places(
    words: Array, places: Array, begin: Int, length: Int, low: Int, low_bits: Int, unary: Int, stop: Int
) -> Int:
    """Decodes a block's places; the end of its unary plane, or minus what is wrong."""
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
            places[i] = total + (origin + one - i << low_bits)
            i += 1
            if i == len(places):
                return at * 32 + one + 1 if places[i - 1] < begin + length else -7
        at += 1
        if at * 32 >= stop:
            return -6
        ahead = np.int64(words[at])
        origin += 32


@compiled
def _read_codes(words: Array, codes: Array, plane: Int, extra: Int, stop: Int, order: Int) -> Int:
    """Decodes a block's codes, whose extra bits begin at `extra`; where they end, beyond `stop` if they do not fit."""
    widths, firsts = (WIDTHS[1], FIRSTS[1]) if order >> 24 else (WIDTHS[0], FIRSTS[0])
    for i in range(len(codes)):
        sign_class = _fetch(words, plane + 3 * i, 3)
        nibble = (sign_class >> 1) * 4
        width = widths >> nibble & 15
        if extra + width > stop:
            return stop + 1
        symbol = (firsts >> nibble & 15) + _fetch(words, extra, width)
        extra += width
        codes[i] = (sign_class & 1) << 3 | (order >> 3 * symbol & 7)
    return extra


@compiled
def _read_signs(words: Array, codes: Array, plane: Int) -> None:
    for i in range(len(codes)):
        codes[i] = _fetch(words, plane + i, 1) << 3


@compiled
def bits_behind(words: Array, position: Int) -> bool:
    """Whether the word that `position` lies in has bits from there on; none if a word begins there."""
    return bool(position & 31) and bool(np.int64(words[position >> 5]) >> (position & 31))


@compiled
def _check_end(words: Array, end: Int, stop: Int) -> Int:
    """Every payload ends in its last word, and there is nothing behind it."""
    if end > stop or end <= stop - 32:
        return 8
    return 9 if bits_behind(words, end) else 0

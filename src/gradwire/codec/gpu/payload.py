"""The compact format of step 6 for CUDA: one payload back to words, by one warp. docs/wire-format.md has the bytes.

The ones of the unary plane are found first, a word each lane; then every lane reads four elements in a row.
Any bits may come: every bound is checked, and nothing outside the payload is read. Bits are counted from its start.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.codec.gpu import shared_memory as shared
from gradwire.codec.gpu.blocks import low_bits

SKEWED = tl.constexpr(1 << 24)
# Of class 0 in the lowest byte to class 3: its first symbol, and its extra bits << 4.
EVEN_CLASSES, SKEWED_CLASSES = tl.constexpr(0x16141210), tl.constexpr(0x24120100)
MOST_WORDS = tl.constexpr((1 << 26) - 1)  # of a payload: 2^24 elements need far less, and its bits fit an int32
WARP, ROW = tl.constexpr(32), tl.constexpr(4)  # lanes of a program, and elements that each reads in one go
WINDOW = tl.constexpr(32 * 32)  # bits of the unary plane that a warp looks at together


@triton.jit
def count_ones(bits):
    """Of uint32. The compiler knows this pattern as one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def shifted(low, high, shift):
    """The 32 bits at `shift` < 32 of two neighbours."""
    low, high = low.to(tl.uint32, bitcast=True).to(tl.uint64), high.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((low | (high << 32)) >> shift.to(tl.uint64)).to(tl.uint32)


@triton.jit
def load_window(payload, n_words, start):
    """WINDOW bits from bit `start` on, and how many ones each word has; zeros behind the end of the payload."""
    at = (start >> 5) + tl.arange(0, WARP)
    low = tl.load(payload + at, mask=at < n_words, other=0)
    high = tl.load(payload + at + 1, mask=at + 1 < n_words, other=0)
    bits = shifted(low, high, start & 31)
    return bits, count_ones(bits)


@triton.jit
def find_ones(memory, bits, n_ones):
    """memory[i] = where in the window its one number i is."""
    tl.debug_barrier()
    here, number = tl.arange(0, WARP) * 32, tl.cumsum(n_ones) - n_ones
    for _ in tl.range(0, tl.max(n_ones)):
        below = bits - 1
        shared.put(memory, number, here + count_ones(bits ^ below) - 1, bits != 0)
        bits &= below
        number += 1
    tl.debug_barrier()


@triton.jit
def fetch(payload, position, last):
    """32 bits of a payload; garbage behind its last word."""
    at = position >> 5
    low, high = tl.load(payload + tl.minimum(at, last)), tl.load(payload + tl.minimum(at + 1, last))
    return shifted(low, high, position & 31).to(tl.int32, bitcast=True)


@triton.jit
def read_low(payload, position, k, last):
    """The low bits of four gaps, k each."""
    a = fetch(payload, position, last)
    if k <= 8:
        b, c, d = a >> k, a >> (2 * k), a >> (3 * k)
    else:
        b, c = fetch(payload, position + k, last), fetch(payload, position + 2 * k, last)
        d = fetch(payload, position + 3 * k, last)
    mask = (1 << k) - 1
    return a & mask, b & mask, c & mask, d & mask


@triton.jit
def read_codes(payload, row, stop, plane, extra, last, order, hybrid: tl.constexpr):
    """The codes of four elements from each of `row` on, and the bit of the extra plane after the last one."""
    codes = ()
    if hybrid:
        signs = fetch(payload, plane + row, last)
        for j in tl.static_range(ROW):
            codes += (((signs >> j) & 1) << 3,)
    else:
        fields = fetch(payload, plane + 3 * row, last)
        table = tl.where((order & SKEWED) != 0, SKEWED_CLASSES, EVEN_CLASSES)
        entries, width = (), row * 0
        for j in tl.static_range(ROW):
            entries += (table >> (((fields >> (3 * j)) & 6) << 2),)
            width += tl.where(row + j < stop, (entries[j] >> 4) & 3, 0)
        extras = fetch(payload, extra + tl.cumsum(width) - width, last)
        extra += tl.sum(width)
        for j in tl.static_range(ROW):
            bits = (entries[j] >> 4) & 3
            symbol = (entries[j] & 7) + (extras & ((1 << bits) - 1))
            extras >>= bits
            codes += ((((fields >> (3 * j)) & 1) << 3) | ((order >> (3 * symbol)) & 7),)
    return codes, extra


@triton.jit
def within_chunk(far, have, n_inside, chunk, splits):
    """The place from the beginning of its chunk on; counts the elements before each of some borders of chunks."""
    for border in tl.range(0, n_inside):
        n_before = tl.sum((have & (far < chunk * (border + 1))).to(tl.int32))
        tl.atomic_add(splits + border, n_before, sem="relaxed")
    for _ in tl.range(0, n_inside):
        far = tl.where(far >= chunk, far - chunk, far)
    return far


@triton.jit
def read_row(
    memory, first, payload, row, stop, window, low, k, plane, extra, total, last, order,
    n_inside, chunk, splits, hybrid: tl.constexpr, single: tl.constexpr,
):  # fmt: skip
    """Four elements from each of `row` on: in memory, their words for the positions of their ones.

    window: where it begins in the unary plane. total: the block's origin - 1 and all low + 1 before. Returns extra and
    total after the last element.
    """
    ones = shared.get_four(memory, row - first)
    lows = read_low(payload, low + row * k, k, last)
    codes, extra = read_codes(payload, row, stop, plane, extra, last, order, hybrid)
    gap = row * 0
    for j in tl.static_range(ROW):
        gap += tl.where(row + j < stop, lows[j] + 1, 0)
    before, words = total + tl.cumsum(gap) - gap, ()
    for j in tl.static_range(ROW):
        before += lows[j] + 1
        place = ((ones[j] + window - row - j) << k) + before
        if not single:
            place = within_chunk(place, row + j < stop, n_inside, chunk, splits)
        words += (place | (codes[j] << 28),)
    shared.put_four(memory, row - first, words[0], words[1], words[2], words[3])
    return extra, total + tl.sum(gap)


@triton.jit
def find_last(payload, n_words, n_bits, unary, count):
    """The window with the last of `count` ones: where it begins, how many ones are before it, its bits and its ones."""
    window, done = unary, 0
    bits, n_ones = load_window(payload, n_words, window)
    while (done + tl.sum(n_ones) < count) & (window + WINDOW < n_bits):
        done += tl.sum(n_ones)
        window += WINDOW
        bits, n_ones = load_window(payload, n_words, window)
    return window, done, bits, n_ones


@triton.jit
def ends_well(payload, n_bits, last, end):
    """Whether the planes end in the last word, with zeros behind."""
    used = end - (n_bits - 32)
    rest = tl.load(payload + last).to(tl.uint32, bitcast=True).to(tl.uint64)
    rest = rest >> tl.minimum(tl.maximum(used, 0), 32).to(tl.uint64)
    return (used >= 1) & (used <= 32) & (rest == 0)


@triton.jit
def read_payload(
    payload, n_words, low, count, length, order, words, start, room, origin, n_inside, chunk, splits,
    hybrid: tl.constexpr, single: tl.constexpr,
):  # fmt: skip
    """Writes the words of a payload to words[start ..]; returns whether it is right."""
    n_bits, last, k = tl.minimum(n_words, MOST_WORDS) * 32, n_words - 1, low_bits(length, count)
    plane = low + count * k
    unary = plane + count * (1 if hybrid else 3)
    good = (unary + count <= n_bits) & (n_words <= MOST_WORDS)
    if good:
        memory = shared.reserve(WINDOW)
        window, done, bits, n_ones = find_last(payload, n_words, n_bits, unary, count)
        good = done + tl.sum(n_ones) >= count
        if good:
            find_ones(memory, bits, n_ones)
            extra = window + shared.get(memory, count - 1 - done) + 1
            high = extra - unary - count  # of the last place; all low + 1 together are no more than the length
            fits = high <= length >> k
            several, window, stop, total = done > 0, unary, tl.where(fits, 0, count), origin - 1
            while stop < count:
                first = stop
                if several:  # otherwise the only one stands in memory
                    bits, n_ones = load_window(payload, n_words, window)
                    find_ones(memory, bits, n_ones)
                stop = tl.minimum(first + tl.sum(n_ones), count)
                for batch in tl.range(first, stop, WARP * ROW):
                    extra, total = read_row(
                        memory, first, payload, batch + tl.arange(0, WARP) * ROW, stop, window - unary, low, k, plane,
                        extra, total, last, order, n_inside, chunk, splits, hybrid, single,
                    )  # fmt: skip
                    tl.debug_barrier()
                    ordinal = batch + tl.arange(0, WARP * ROW)
                    inside = (ordinal < stop) & (start + ordinal < room)
                    tl.store(words + start + ordinal, shared.get(memory, ordinal - first), mask=inside)
                window += WINDOW
            good = fits & ((high << k) + total < origin + length) & ends_well(payload, n_bits, last, extra)
    return good

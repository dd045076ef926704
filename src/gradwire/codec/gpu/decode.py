"""Step 6 for CUDA, and the checksum of steps 4 and 6: Triton kernels. triton_check.py has what comes before `add`.

checksum   sum_i mix(x_i + i KEY) of every message
add        out = the mean over the ranks, in their order, tile by tile in shared memory
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.codec import header
from gradwire.codec.gpu import shared

PLACE = tl.constexpr((1 << 28) - 1)
AHEAD = tl.constexpr(8)  # ranks whose words are on their way together
KEY, MULTIPLIER = tl.constexpr(header.KEY), tl.constexpr(header.MULTIPLIER)
OWN = tl.constexpr(header.CHECKSUM.start // 2)  # the pair of words that the checksum is in


@triton.jit
def mixed(x):
    x = (x ^ (x >> 32)) * MULTIPLIER
    x = (x ^ (x >> 32)) * MULTIPLIER
    return x ^ (x >> 32)


@triton.jit
def pairs(words):
    """Words two by two, as 64 bits: the first is the low half."""
    low, high = tl.split(tl.reshape(words.to(tl.uint32, bitcast=True), (words.shape[0] // 2, 2)))
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit(do_not_specialize=["n_words"])
def checksum_kernel(messages, stride: tl.int64, n_words, total, width: tl.constexpr, rounds: tl.constexpr):
    """Program (part of a message, rank). Integers modulo 2^64: the order in which they are added is of no account.

    Without a mask but for the last part: with one, loads are a word each, and took 1.4 times as long.
    """
    rank, begin, added = tl.program_id(1), tl.program_id(0) * (width * rounds), tl.zeros((width,), tl.uint64)
    message, left = messages + rank * stride + 2 * begin, n_words - 2 * begin
    key, step = (begin + tl.arange(0, width)).to(tl.uint64) * KEY, tl.full((), width, tl.uint64) * KEY
    if left >= 2 * width * rounds:
        for number in tl.static_range(rounds):
            added += mixed(pairs(tl.load(message + number * 2 * width + tl.arange(0, 2 * width))) + key)
            key += step
    else:
        for number in tl.static_range(rounds):
            at = number * 2 * width + tl.arange(0, 2 * width)
            found = mixed(pairs(tl.load(message + at, mask=at < left, other=0)) + key)
            added += tl.where(number * 2 * width + 2 * tl.arange(0, width) < left, found, 0)
            key += step
    all_of_them = tl.sum(added)
    if (begin == 0) & (n_words > 2 * OWN):  # without its own place
        at = 2 * OWN + tl.arange(0, 2)
        own = pairs(tl.load(message + at, mask=at < n_words, other=0))
        all_of_them -= tl.sum(mixed(own + tl.full((), OWN, tl.uint64) * KEY))
    tl.atomic_add(total + rank, all_of_them.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def coming_words(words, stride, bounds, exponents, first, n_ranks, n_slots, lane, bad):
    """Of AHEAD ranks from `first` on: where their words of a tile begin and end, the exponent, the first of the words.

    bounds: where they begin, and in the next row where they end. No words if `bad`. Loads that do not wait for one
    another.
    """
    coming = ()
    for ahead in tl.static_range(AHEAD):
        rank = first + ahead
        ours = (rank < n_ranks) & (bad == 0)
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
    words, stride: tl.int64, starts, bad, exponents, base, low, high, slot, origin, out, tau, share, n_ranks, n_slots,
    hybrid: tl.constexpr, size: tl.constexpr, lanes: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """One program a tile, which is summed up in shared memory and goes to global memory once; if `bad`, never."""
    tile, lane, is_bad = tl.program_id(0), tl.arange(0, lanes), tl.load(bad)
    memory = shared.reserve(size)
    its_base, its_exponents = tl.load(base + tile), exponents + tl.load(slot + tile)
    its_origin = (its_base - tl.load(origin + tile)).to(tl.int32)
    shared.clear(memory, size)
    for first in tl.range(0, n_ranks, AHEAD):
        bounds = starts + tile * n_ranks
        coming = coming_words(words, stride, bounds, its_exponents, first, n_ranks, n_slots, lane, is_bad)
        for ahead in tl.static_range(AHEAD):
            begin, end, exponent, word = coming[ahead]
            message = words + (first + ahead) * stride
            tl.debug_barrier()  # the sums of one rank are in place before the next one reads them
            for at in tl.range(begin, end, lanes):
                following = tl.load(message + at + lanes + lane, mask=at + lanes + lane < end, other=0)
                add_words(memory, word, at + lane < end, exponent, tau, share, its_origin, hybrid)
                word = following
    tl.debug_barrier()
    its_low, its_high = tl.load(low + tile), tl.where(is_bad == 0, tl.load(high + tile), 0)
    for start in tl.range(0, size, piece):
        place = start + tl.arange(0, piece)
        value = shared.get(memory, place).to(tl.float32, bitcast=True)
        if its_high - its_low == size:
            tl.store(out + its_base + place, value)
        else:
            tl.store(out + its_base + place, value, mask=(place >= its_low) & (place < its_high))

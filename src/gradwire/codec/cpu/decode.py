"""Step 6 as machine code for the CPU: words are checked, added and turned into places; see compiled_encode."""

from __future__ import annotations

import numpy as np

from gradwire.codec import header
from gradwire.codec.cpu.encode import ZERO
from gradwire.compile.machine_code import Array, compiled

CACHED = 1 << 16  # elements of a result that stay in the second-level cache while all ranks' words are added to them
KEY, MULTIPLIER, HALF = np.uint64(header.KEY), np.uint64(header.MULTIPLIER), np.uint64(32)
OWN = header.CHECKSUM.start // 2  # the pair of words that the checksum is in


@compiled
def check(
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
            if not hybrid and exponents[rank, slot] - (code & 7) < -126:
                found[rank, 1] = True


@compiled
def first_at_least(words: Array, rank: int, begin: int, end: int, place: int) -> int:
    """The first of words[rank, begin:end] whose place is not below `place`."""
    while begin < end:
        middle = (begin + end) // 2
        if (words[rank, middle] & 0x0FFFFFFF) < place:
            begin = middle + 1
        else:
            end = middle
    return begin


@compiled
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


@compiled
def add(
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


@compiled
def mixed(pair: np.uint64, number: int) -> np.uint64:
    """What x_number adds to the checksum."""
    x = pair + np.uint64(number) * KEY
    x = (x ^ (x >> HALF)) * MULTIPLIER
    x = (x ^ (x >> HALF)) * MULTIPLIER
    return x ^ (x >> HALF)


@compiled
def checksum(begin: int, end: int, words: Array) -> np.uint64:
    """sum_i mix(x_i + i KEY) of the pairs begin .. end of words, modulo 2^64, without its own."""
    total, pairs = np.uint64(0), words[: words.size // 2 * 2].view(np.uint64)
    for first, last in ((begin, min(end, OWN)), (max(begin, OWN + 1), min(end, pairs.size))):
        for i in range(first, last):
            total += mixed(pairs[i], i)
    if end > pairs.size:
        total += mixed(np.uint64(np.uint32(words[words.size - 1])), pairs.size)
    return total


@compiled
def split_words(words: Array, counts: Array, chunk: int, index: Array, code: Array) -> None:
    """Words, in chunks of `counts`, to places and codes."""
    at = 0
    for c in range(counts.size):
        for i in range(at, at + counts[c]):
            index[i] = c * chunk + (words[i] & 0x0FFFFFFF)
            code[i] = words[i] >> 28 & 15
        at += counts[c]


@compiled
def join_words(index: Array, code: Array, chunk: int, words: Array, counts: Array) -> None:
    """Places, ascending, and codes to words, and how many there are in each chunk."""
    at, c = 0, 0
    while at < index.size:
        while index[at] >= (c + 1) * chunk:
            c += 1
        while at < index.size and index[at] < (c + 1) * chunk:
            words[at] = np.int32(np.uint32(code[at]) << np.uint32(28) | np.uint32(index[at] - c * chunk))
            counts[c] += 1
            at += 1

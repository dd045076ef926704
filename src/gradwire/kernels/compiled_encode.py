"""Steps 2 to 4 as machine code for the CPU: loops that Numba compiles, each over one part of a bucket.

A bucket is cut into segments, runs of elements of one tensor. Every function takes a range of segments, so that
threads share them; all of them release the GIL. No fast-math anywhere: every operation is rounded by itself.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.bit_masks import N_FLAGS, lowest_bits
from gradwire.machine import Array, compiled, trailing_zeros

TILE = 1024  # elements that stay in the first cache between the loop that decides and the one that collects
SHIFT = 272  # elements: arrays that are walked together must not begin at the same place of a page
PASSES, BAD = 1, 2
BADS = np.uint64(0x0202020202020202)
MAGNITUDE = np.int32(0x7FFFFFFF)
LARGEST = np.float32(3.4028234663852886e38)
ZERO = np.float32(0)
ONE = np.uint64(1)
DROPPED = 255  # a candidate that is not sent: below the window, or without room
FULL = 255  # what a counter of eight bits holds


@compiled
def decide_tile(
    r: Array,
    v: Array,
    g: Array,
    m: Array,
    flags: Array,
    alpha: np.float32,
    zeta: np.float32,
    least: np.float32,
    floor_square: np.float32,
) -> None:
    """r += g, v += m, and v decays where the element does not pass; flags: PASSES, BAD, or 0.

    A bad value adds nothing. No sum, no maximum, no branch: so the loop is vectorized whole.
    """
    for i in range(r.size):
        a, b = r[i] + g[i], v[i] + m[i]
        good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
        a = a if good else r[i]
        b = b if good else v[i]
        passes = (a * a > b * alpha + floor_square) & (abs(a) >= least)
        r[i] = a
        v[i] = b if passes else b * zeta
        flags[i] = np.uint8(passes) | np.uint8(not good) << np.uint8(1)


@compiled
def collect_tile(
    r: Array,
    v: Array,
    flags: Array,
    offset: np.uint64,
    places: Array,
    old_residual: Array,
    old_variance: Array,
    n_found: np.uint64,
) -> np.uint64:
    """Writes down who passes, and r = v = 0 there; how many there are now.

    Indices are unsigned, because Numba tests signed ones for their sign.
    """
    for start in range(0, r.size, N_FLAGS):
        mask = lowest_bits(flags, np.uint64(start))  # type: ignore[call-arg, arg-type]
        while mask != 0:
            pick = np.uint64(start) + np.uint64(trailing_zeros(mask))  # type: ignore[call-arg]
            mask &= mask - 1
            places[n_found] = np.int32(offset + pick)
            old_residual[n_found], old_variance[n_found] = r[pick], v[pick]
            r[pick], v[pick] = ZERO, ZERO
            n_found += ONE
    return n_found


@compiled
def largest(residual: Array, top: np.int32) -> np.int32:
    """The bits of the largest |r|, or `top`: integers, so that the loop is vectorized."""
    bits = residual.view(np.int32)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top


@compiled
def least_sent(top: np.int32, half: np.int32, top_half: np.int32, least: np.float32) -> np.float32:
    """The smallest |r| that can be sent if the tensor's largest one has at least the bits `top`."""
    if half < 0:
        return least
    bound = np.zeros(1, np.int32)
    exponent = min((top + top_half) >> np.int32(23), np.int32(254))
    bound[0] = max(((exponent - np.int32(7)) << np.int32(23)) - half, np.int32(0))
    return max(bound.view(np.float32)[0], least)


@compiled
def stream(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    inputs: tuple[Array, Array, Array, Array],
    test: tuple[np.float32, np.float32, np.float32, np.float32],
    window: tuple[np.int32, np.int32],
    lists: tuple[Array, Array, Array],
    counts: Array,
    tops: Array,
    bad: Array,
) -> None:
    """Accumulate and decide for the segments first..last; who passes is written down, the others are finished.

    A passing element gets r = v = 0 at once, because nearly all of them are sent; `emit` puts the others back. What is
    below the window of the largest |r| found so far is certainly not sent, so it does not pass: to put one back costs
    two cache misses. inputs: r, v, g, m. test: alpha, zeta, the least |r|, floor^2. window: what rounds a size, -1
    where there is no window, and what rounds the largest. lists: place, r, v. tops: bits of the largest |r|.
    """
    flags = np.zeros(TILE, np.uint8)
    eights = flags.view(np.uint64)
    (residual, variance, grad, moment), (alpha, zeta, least, floor_square), (half, top_half) = inputs, test, window
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        found = lists[0][begin:end], lists[1][begin:end], lists[2][begin:end]
        n_found, wrong, top, bound = np.uint64(0), np.uint64(0), np.int32(0), least
        for tile in range(begin, end, TILE):
            here = slice(tile, min(tile + TILE, end))
            r, v = residual[here], variance[here]
            decide_tile(r, v, grad[here], moment[here], flags, alpha, zeta, bound, floor_square)
            flags[r.size :] = 0
            for i in range(eights.size):
                wrong |= eights[i]
            before = np.int64(n_found)
            n_found = collect_tile(r, v, flags, np.uint64(tile - begin), *found, n_found)
            if np.int64(n_found) != before:
                top = largest(found[1][before : np.int64(n_found)], top)
                bound = least_sent(top, half, top_half, least)
        counts[segment], bad[segment], tops[segment] = n_found, wrong & BADS != 0, top


@compiled
def classify(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    slots: Array,
    tops: Array,
    half: np.int32,
    tau_binade: np.int32,
    old_residual: Array,
    codes: Array,
    histogram: Array,
) -> None:
    """Sign << 3 | size class of the candidates, and a histogram of the classes by segment.

    The class is d, or with tau 7 less the binades above it. tops: biased exponents by tensor. tau_binade: that of tau,
    or -1 where there is none.
    """
    for segment in range(first, last):
        here = slice(begins[segment], begins[segment] + counts[segment])
        bits, its_codes, top = old_residual[here].view(np.int32), codes[here], tops[slots[segment]]
        for i in range(bits.size):
            size = bits[i] & MAGNITUDE
            sign = (bits[i] >> np.int32(28)) & np.int32(8)
            distance = max(top - ((size + half) >> np.int32(23)), np.int32(0))
            above = min((size >> np.int32(23)) - tau_binade, np.int32(7))
            size_class = distance if tau_binade < 0 else np.int32(7) - above
            its_codes[i] = np.uint8(sign | size_class) if size_class <= 7 else np.uint8(DROPPED)
        count_classes(its_codes, histogram[segment])


@compiled
def count_classes(codes: Array, histogram: Array) -> None:
    """How many there are of each size class, [8]: in eight counters of eight bits, emptied before they are full."""
    histogram[:] = 0
    for start in range(0, codes.size, FULL):
        part, packed = codes[start : start + FULL], np.uint64(0)
        for i in range(part.size):
            one = np.uint64(part[i] != DROPPED)
            packed += one << (np.uint64(part[i] & np.uint8(7)) << np.uint64(3))
        for size_class in range(8):
            histogram[size_class] += np.int64(packed >> np.uint64(8 * size_class) & np.uint64(FULL))


@compiled
def cut(
    first: int,
    last: int,
    partial: int,
    room: int,
    start: int,
    begins: Array,
    counts: Array,
    places: Array,
    codes: Array,
) -> None:
    """One tensor that has no room for all: classes before `partial` go, of that one `room` from place `start` on."""
    before, total = 0, 0
    for segment in range(first, last):
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED and codes[i] & 7 == partial:
                before += begins[segment] + places[i] < start
                total += 1
    number = 0
    for segment in range(first, last):
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] == DROPPED or codes[i] & 7 < partial:
                continue
            if codes[i] & 7 > partial:
                codes[i] = DROPPED
                continue
            rank = number - before if begins[segment] + places[i] >= start else number + total - before
            number += 1
            if rank >= room:
                codes[i] = DROPPED


@compiled
def tally(first: int, last: int, begins: Array, counts: Array, codes: Array, histogram: Array) -> None:
    """How many of each segment's candidates are sent, by size class."""
    for segment in range(first, last):
        count_classes(codes[begins[segment] : begins[segment] + counts[segment]], histogram[segment])


@compiled
def emit(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    slots: Array,
    outs: Array,
    exponents: Array,
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array,
    residual: Array,
    variance: Array,
    zeta: np.float32,
    tau: np.float32,
    feedback: bool,
    chunk: int,
    words: Array,
) -> None:
    """Writes the words of what is sent and settles it; everybody else gets r and v back, decayed."""
    kept = np.uint8(8) if tau > ZERO else np.uint8(15)  # with tau the size is always tau
    for segment in range(first, last):
        begin, out, end = begins[segment], np.uint64(outs[segment]), begins[segment] + counts[segment]
        its_places, its_codes = places[begin:end], codes[begin:end]
        origin = begin % chunk  # a segment lies in one chunk
        for i in range(its_places.size):
            if its_codes[i] == DROPPED:
                place = np.uint64(begin + its_places[i])
                residual[place], variance[place] = old_residual[begin + i], old_variance[begin + i] * zeta
                continue
            code = np.uint32(its_codes[i] & kept)
            words[out] = np.int32(code << np.uint32(28) | np.uint32(origin + its_places[i]))
            out += ONE
        if tau > ZERO or feedback:
            exponent = exponents[slots[segment]]
            lists = (its_places, its_codes, old_residual[begin:end], old_variance[begin:end])
            settle(*lists, residual[begin:], variance[begin:], exponent, tau)


@compiled
def settle(
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array,
    residual: Array,
    variance: Array,
    exponent: int,
    tau: np.float32,
) -> None:
    """What is left of the elements of one segment that are sent, with tau or with feedback."""
    one = np.empty(1, np.float32)
    bits, tau_square = one.view(np.int32), tau * tau
    for i in range(places.size):
        code, place, r = codes[i], np.uint64(places[i]), old_residual[i]
        if code == DROPPED:
            continue
        if tau > ZERO:
            residual[place] = r + tau if code & 8 else r - tau
            variance[place] = max(old_variance[i] - abs(r) * np.float32(2) * tau + tau_square, ZERO)
        else:
            bits[0] = (exponent - (code & 7) + 127) << 23
            rest = r + one[0] if code & 8 else r - one[0]
            residual[place], variance[place] = rest, rest * rest


@compiled
def put_back(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array,
    residual: Array,
    variance: Array,
) -> None:
    """Every sent element gets r and v back as they were before the send."""
    for segment in range(first, last):
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED:
                place = begins[segment] + places[i]
                residual[place], variance[place] = old_residual[i], old_variance[i]

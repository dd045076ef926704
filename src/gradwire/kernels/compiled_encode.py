"""Steps 2 to 4 as machine code for the CPU: loops that Numba compiles, each over one part of a bucket.

A bucket is cut into segments, runs of elements of one tensor. Every function takes a range of segments, so that
threads share them; all of them release the GIL. No fast-math anywhere: every operation is rounded by itself.
"""

from __future__ import annotations

import numpy as np

from gradwire.machine import Array, compiled, trailing_zeros

TILE = 8192  # elements that stay in the cache between the pass that decides and the one that collects
PASSES, BAD = 1, 2
LARGEST = np.float32(3.4028234663852886e38)
ZERO = np.float32(0)
DROPPED = 255  # a candidate that is not sent: below the window, or without room


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
def mask_of(eights: Array, start: int) -> np.int64:
    """Which of 64 flags are there, as the bits of an int64; eights: the flags, eight in a word."""
    mask = np.uint64(0)
    for i in range(8):
        mask |= eights[start + i]
    if mask == 0:  # nearly always at a ratio of 1,000
        return np.int64(0)
    mask = np.uint64(0)
    for i in range(8):
        some = eights[start + i]
        low = (some | some >> np.uint64(1)) & np.uint64(0x0101010101010101)
        mask |= (low * np.uint64(0x0102040810204080)) >> np.uint64(56) << np.uint64(8 * i)
    return np.int64(mask)


@compiled
def stream(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    grad: Array,
    moment: Array,
    residual: Array,
    variance: Array,
    alpha: np.float32,
    zeta: np.float32,
    least: np.float32,
    floor_square: np.float32,
    places: Array,
    old_residual: Array,
    old_variance: Array,
    counts: Array,
    tops: Array,
    bad: Array,
) -> None:
    """Accumulate and decide for the segments first..last; who passes is written down, the others are finished.

    A passing element gets r = v = 0 at once, because nearly all of them are sent; `emit` puts the others back.
    """
    flags = np.zeros(TILE, np.uint8)
    eights = flags.view(np.uint64)
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        n_found, top, wrong = begin, ZERO, 0
        for tile in range(begin, end, TILE):
            size = min(TILE, end - tile)
            here = slice(tile, tile + size)
            r, v = residual[here], variance[here]
            decide_tile(r, v, grad[here], moment[here], flags, alpha, zeta, least, floor_square)
            flags[size:] = 0
            for start in range(0, size, 64):
                mask = mask_of(eights, start // 8)
                while mask != 0:
                    pick = start + trailing_zeros(mask)  # type: ignore[call-arg]
                    mask &= mask - 1
                    wrong |= flags[pick] & BAD
                    if flags[pick] & PASSES:
                        places[n_found] = tile - begin + pick
                        old_residual[n_found], old_variance[n_found] = r[pick], v[pick]
                        top = max(top, abs(r[pick]))
                        r[pick], v[pick] = ZERO, ZERO
                        n_found += 1
        counts[segment], tops[segment], bad[segment] = n_found - begin, top, wrong


@compiled
def classify(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    slots: Array,
    tops: Array,
    half: int,
    tau_binade: int,
    old_residual: Array,
    codes: Array,
    histogram: Array,
) -> None:
    """Sign << 3 | size class of the candidates, and a histogram of the classes by segment.

    The class is d, or with tau 7 less the binades above it. tops: biased exponents by tensor. tau_binade: that of tau,
    or -1 where there is none.
    """
    bits = old_residual.view(np.int32)
    for segment in range(first, last):
        histogram[segment] = 0
        top = tops[slots[segment]]
        for i in range(begins[segment], begins[segment] + counts[segment]):
            size = bits[i] & 0x7FFFFFFF
            sign = np.uint8((bits[i] >> 28) & 8)
            distance = max(top - ((size + half) >> 23), 0)
            size_class = distance if tau_binade < 0 else 7 - min((size >> 23) - tau_binade, 7)
            if size_class > 7:
                codes[i] = DROPPED
            else:
                codes[i] = sign | np.uint8(size_class)
                histogram[segment, size_class] += 1


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
        histogram[segment] = 0
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED:
                histogram[segment, codes[i] & 7] += 1


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
    one = np.empty(1, np.float32)
    bits = one.view(np.int32)
    tau_square = tau * tau
    for segment in range(first, last):
        out = outs[segment]
        for i in range(begins[segment], begins[segment] + counts[segment]):
            place, code = begins[segment] + places[i], codes[i]
            r, v = old_residual[i], old_variance[i]
            if code == DROPPED:
                residual[place], variance[place] = r, v * zeta
                continue
            if tau > ZERO:
                code &= 8  # the size is always tau
            words[out] = np.int32(np.uint32(code) << np.uint32(28) | np.uint32(place % chunk))
            out += 1
            if tau > ZERO:
                sent = -tau if code & 8 else tau
                residual[place] = r - sent
                variance[place] = max(v - abs(r) * np.float32(2) * tau + tau_square, ZERO)
            elif feedback:
                bits[0] = (exponents[slots[segment]] - (code & 7) + 127) << 23
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

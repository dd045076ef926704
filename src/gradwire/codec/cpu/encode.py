"""Steps 3 and 4 as machine code for the CPU: loops that Numba compiles, over the elements that passed.

As in compiled_stream.py, every function takes a range of segments, so that threads share them.
"""

from __future__ import annotations

import numpy as np

from gradwire.codec.cpu.stream import MAGNITUDE, ONE
from gradwire.compile.machine_code import Array, compiled

ZERO = np.float32(0)
DROPPED = 255  # a candidate that is not sent: below the window, or without room
FULL = 255  # what a counter of eight bits holds


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

"""Steps 2 to 4 for CUDA: six Triton kernels, of which only the first touches every element.

    stream     r += g, v += m, test; who passes gets r = v = 0 and is written down tile by tile, in the scratch
    classify   size classes of those, from the tensor's exponent: a histogram of 8 classes for every tile and tensor
    share      per tensor: exponent, how many passed, and where room is short which class is cut, and where
    scan       where each group's words begin
    emit       the words; who is not sent gets r and v back; what is sent is settled
    put_back   undo: whoever is still written down gets r and v back

A tile that finds the scratch full is *spilled*: its r and v stay as accumulated and later kernels test it again. Class 8
is below the window of 3 bits: not sent. Nothing waits for the host, no float is added atomically, and all kernels are
launched without fusing multiply and add: every operation is rounded by itself, as the reference does it.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,type-arg"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
CLASSES = tl.constexpr(8)
DROPPED = tl.constexpr(8)
SPILLED = tl.constexpr(-1)
NOTHING = tl.constexpr(-128)
SPAN = tl.constexpr(256)  # places of a spilled tile at a time: no more registers than the candidates take


class Cut(NamedTuple):
    """The geometry: see `Tiles`."""

    base: Any
    low: Any
    high: Any
    slot: Any
    origin: Any
    first_of_slot: Any
    first_of_chunk: Any
    offset: Any
    length: Any
    live: Any


class State(NamedTuple):
    residual: Any
    variance: Any


class Test(NamedTuple):
    """r^2 > alpha v + floor_square and |r| >= least."""

    alpha: Any
    zeta: Any
    least: Any
    floor_square: Any


class Quantum(NamedTuple):
    """How sizes become classes. hybrid: tau is all that is sent; tau_binade: its biased exponent; tau_square: tau^2."""

    half: Any
    unbiased: Any
    hybrid: Any
    tau: Any
    tau_binade: Any
    tau_square: Any


class Found(NamedTuple):
    """The scratch: local place, r and v of those that passed; position and count of every tile's in it."""

    place: Any
    residual: Any
    variance: Any
    position: Any
    count: Any


class Sums(NamedTuple):
    """Zeroed before the first kernel: places taken in the scratch and in its reserve, a bad value, a tensor cut short,
    bits of the largest |r| [K], classes by tensor [K, 8]."""

    taken: Any
    bad: Any
    tops: Any
    totals: Any


class Plan(NamedTuple):
    """numbers: step * GOLDEN, room in the scratch, capacity [K]. limits [K, 4]: cut class, its room, before, total.

    histogram: classes by tile; by_group: classes by group; prefix, begin [G]: partial ones and words before the group.
    """

    numbers: Any
    limits: Any
    histogram: Any
    by_group: Any
    prefix: Any
    begin: Any


@triton.jit
def passing(a, b, least, test):
    return (a * a > b * test.alpha + test.floor_square) & (tl.abs(a) >= least)


@triton.jit
def least_sent(known, test, quantum):
    """The smallest |r| that can be sent if the tensor's largest one is at least `known` (bits)."""
    if quantum.hybrid:
        return test.least
    bound = ((exponent_of(known, quantum) - 7) << 23) - quantum.half
    return tl.maximum(tl.maximum(bound, 0).to(tl.float32, bitcast=True), test.least)


@triton.jit
def exponent_of(top, quantum):
    """Biased exponent of a tensor from the bits of its largest |r|."""
    if quantum.unbiased:
        top += quantum.half
    return tl.minimum(top >> 23, 254)


@triton.jit
def class_of(bits, top, quantum):
    """0 is the largest; with tau: how many binades |r| is above it, 7 at the end. 8: not in the window."""
    size = bits & MAGNITUDE
    if quantum.hybrid:
        return 7 - tl.minimum((size >> 23) - quantum.tau_binade, 7)
    return tl.minimum(tl.maximum(top - ((size + quantum.half) >> 23), 0), DROPPED)


@triton.jit
def overlap(low, count, limits):
    """How many of low .. low + count - 1 lie in the window before .. before + room - 1 modulo total."""
    _, room, before, total = limits
    high = low + count
    one = tl.minimum(high, before + room) - tl.maximum(low, before)
    two = tl.minimum(high, before + room - total) - tl.maximum(low, before - total)
    return tl.maximum(one, 0) + tl.maximum(two, 0)


@triton.jit
def limits_of(plan, slot):
    at = plan.limits + slot * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def accumulate(grad, moment, state, base, low, high, least, test, whole: tl.constexpr, size: tl.constexpr):
    """(r + g, v + m, who is good, who passes) of one tile; r and v are written as if all that pass were sent."""
    lane = tl.arange(0, size)
    r_at, v_at = state.residual + base + lane, state.variance + base + lane
    g_at, m_at = grad + base + lane, moment + base + lane
    if whole:  # apart, because a mask that could end anywhere makes every load 4 bytes wide
        r, v = tl.load(r_at), tl.load(v_at)
        g = tl.load(g_at, eviction_policy="evict_first")
        m = tl.load(m_at, eviction_policy="evict_first")
    else:
        inside = (lane >= low) & (lane < high)
        r, v = tl.load(r_at, mask=inside, other=0.0), tl.load(v_at, mask=inside, other=0.0)
        g, m = tl.load(g_at, mask=inside, other=0.0), tl.load(m_at, mask=inside, other=0.0)
    a, b = r + g, v + m
    good = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))
    a, b = tl.where(good, a, r), tl.where(good, b, v)
    passes = passing(a, b, least, test)
    left_residual, left_variance = tl.where(passes, 0.0, a), tl.where(passes, 0.0, b * test.zeta)
    if whole:
        tl.store(r_at, left_residual)
        tl.store(v_at, left_variance)
    else:
        tl.store(r_at, left_residual, mask=inside)
        tl.store(v_at, left_variance, mask=inside)
    return a, b, good, passes


@triton.jit
def note(a, b, good, passes, known, tile, slot, base, low, high, state, found, sums, plan, size: tl.constexpr):
    """Writes down who passes in one tile."""
    lane = tl.arange(0, size)
    bits = a.to(tl.int32, bitcast=True) & MAGNITUDE
    rare = (good == 0) | (passes & (bits > known))
    summary = tl.sum(passes.to(tl.int32) + (rare.to(tl.int32) << 16))
    count = summary & 0xFFFF
    tl.store(found.count + tile, count)
    if summary >> 16 != 0:
        tl.atomic_max(sums.tops + slot, tl.max(tl.where(passes, bits, 0)), sem="relaxed")
        if tl.min(good.to(tl.int32)) == 0:
            tl.store(sums.bad, 1)
    if count != 0:
        taken = (count + 7) // 8 * 8
        position = tl.atomic_add(sums.taken, taken.to(tl.int64), sem="relaxed")
        if position + taken <= tl.load(plan.numbers + 1):
            # Said to be contiguous so that the values stay in the threads that loaded them, and do not go through
            # shared memory first. The mask, different from lane to lane, keeps every store one element wide.
            at = tl.max_contiguous(tl.multiple_of(tl.cumsum(passes.to(tl.int32)) - 1, 4), 4)
            position = tl.multiple_of(position, 8)
            tl.store(found.place + position + at, lane.to(tl.int16), mask=passes)
            tl.store(found.residual + position + at, a, mask=passes)
            tl.store(found.variance + position + at, b, mask=passes)
        else:
            position = position * 0 + SPILLED
            tl.debug_barrier()
            inside = (lane >= low) & (lane < high)
            tl.store(state.residual + base + lane, a, mask=inside)
            tl.store(state.variance + base + lane, b, mask=inside)
        tl.store(found.position + tile, position)


@triton.jit
def stream_kernel(
    grad, moment, state, cut, test, quantum, found, sums, plan,
    all_live: tl.constexpr, size: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One program a tile.

    What is below the window of the largest |r| that the tensor's tiles have found so far is certainly not sent, so it
    does not pass here. How much that catches depends on the order of the tiles; what is sent does not: `emit` drops
    the rest. (It saves `emit` from putting them back one by one: H200, ratio 10, 8 % below the window.)
    """
    tile = tl.program_id(0)
    base = tl.multiple_of(tl.load(cut.base + tile), 32)
    low, high = tl.load(cut.low + tile), tl.load(cut.high + tile)
    slot = tl.load(cut.slot + tile // group)
    if not all_live:
        high = tl.where(tl.load(cut.live + slot) != 0, high, low)
    known = tl.load(sums.tops + slot, cache_modifier=".cg")  # not from the first-level cache, which is never renewed
    least = least_sent(known, test, quantum)
    if high == low:
        tl.store(found.count + tile, 0)
    elif high - low == size:
        a, b, good, passes = accumulate(grad, moment, state, base, low, high, least, test, True, size)
        note(a, b, good, passes, known, tile, slot, base, low, high, state, found, sums, plan, size)
    else:
        a, b, good, passes = accumulate(grad, moment, state, base, low, high, least, test, False, size)
        note(a, b, good, passes, known, tile, slot, base, low, high, state, found, sums, plan, size)


@triton.jit
def spilled_part(tile, start, top, state, cut, test, quantum):
    """(class or 8, r, v, lanes inside) of SPAN places of a tile that is not in the scratch."""
    lane = start + tl.arange(0, SPAN)
    base = tl.load(cut.base + tile)
    inside = (lane >= tl.load(cut.low + tile)) & (lane < tl.load(cut.high + tile))
    r = tl.load(state.residual + base + lane, mask=inside, other=0.0)
    v = tl.load(state.variance + base + lane, mask=inside, other=0.0)
    classes = class_of(r.to(tl.int32, bitcast=True), top, quantum)
    return tl.where(passing(r, v, test.least, test), classes, DROPPED), r, v, inside


@triton.jit
def classify_kernel(
    state, cut, test, quantum, found, sums, plan, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr
):
    """One program a group: how many of each class are in each of its tiles; rows are tiles, columns candidates."""
    number = tl.program_id(0)
    slot = tl.load(cut.slot + number)
    row, column = number * group + tl.arange(0, group), tl.arange(0, CLASSES)
    count = tl.load(found.count + row)
    position = tl.load(found.position + row, mask=count > 0, other=0)
    top = exponent_of(tl.load(sums.tops + slot), quantum)
    kept = tl.where(position != SPILLED, count, 0)
    packed = tl.zeros((group, lanes), tl.int64)  # eight counters of eight bits: a lane sees less than 256 candidates
    lane = tl.arange(0, lanes)[None, :]
    ahead = tl.load(found.residual + position[:, None] + lane, mask=lane < kept[:, None], other=0.0)
    for _done in tl.range(0, tl.max(kept), lanes):
        r, have = ahead, lane < kept[:, None]
        lane += lanes
        ahead = tl.load(found.residual + position[:, None] + lane, mask=lane < kept[:, None], other=0.0)
        classes = class_of(r.to(tl.int32, bitcast=True), top, quantum)
        one = tl.where(have & (classes < DROPPED), 1, 0).to(tl.int64)
        packed += one << (8 * (classes & 7)).to(tl.int64)
    even = tl.sum(packed & 0x00FF00FF00FF00FF, axis=1)
    odd = tl.sum((packed >> 8) & 0x00FF00FF00FF00FF, axis=1)
    pair = tl.where((column & 1)[None, :] == 1, odd[:, None], even[:, None])
    histogram = ((pair >> (16 * (column >> 1)).to(tl.int64)[None, :]) & 0xFFFF).to(tl.int32)
    if tl.min(position) == SPILLED:
        for tile in tl.range(number * group, number * group + group):
            if tl.sum(tl.where((row == tile) & (position == SPILLED), 1, 0)) != 0:
                for start in tl.range(0, size, SPAN):
                    classes, _, _, _ = spilled_part(tile, start, top, state, cut, test, quantum)
                    for c in tl.range(0, CLASSES):
                        here = (row == tile)[:, None] & (column == c)[None, :]
                        histogram += tl.where(here, tl.sum((classes == c).to(tl.int32)), 0)
    tl.store(plan.histogram + row[:, None] * CLASSES + column[None, :], histogram)
    whole = tl.sum(histogram, axis=0)
    tl.store(plan.by_group + number * CLASSES + column, whole)
    if tl.max(count) != 0:
        tl.atomic_add(sums.totals + slot * CLASSES + column, whole, sem="relaxed")

"""Steps 2 to 4 for CUDA: Triton kernels, of which only the first touches every element.

    stream     r += g, v += m, test; who passes gets r = v = 0 and is written down tile by tile, in the scratch
    classify   how many of each size class every tile has, where somebody must know it beforehand
    share      per tensor: exponent, how many passed, and where room is short which class is cut, and where
    scan       where each group's words begin
    emit       the words; what is sent is settled; emit_cut also puts back who is not sent
    clear      zeros after the last word
    put_back   undo: whoever is still written down gets r and v back

The first two are here, the others in triton_share.py and triton_emit.py, the records in triton_records.py.
A candidate is an element that passed. A tile that finds the scratch full is *spilled*: its r and v stay as accumulated
and later kernels test it again. Class 8 is below the window of 3 bits: not sent. Nothing waits for the host, no float
is added atomically, and no multiply and add is fused: every operation is rounded by itself, as in the reference.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.triton_records import (
    APART,
    BAD,
    CLASSES,
    DROPPED,
    MAGNITUDE,
    SPAN,
    SPILLED,
    census,
    class_of,
    counters,
    exponent_of,
    is_short,
    least_sent,
    passing,
    spilled_part,
    tally,
)


@triton.jit
def accumulate(grad, moment, state, base, low, high, top_at, test, quantum, whole: tl.constexpr, size: tl.constexpr):
    """(r + g, v + m, who passes, bits of |r| of those or BAD, the largest known) of one tile.

    r and v are written as if all that pass were sent.
    """
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
    # Read by an atomic, so that all threads see the same while other programs raise it.
    known = tl.atomic_max(top_at, 0, sem="relaxed")
    a, b = r + g, v + m
    good = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))
    a, b = tl.where(good, a, r), tl.where(good, b, v)
    passes = passing(a, b, least_sent(known, test, quantum), test)
    left_residual, left_variance = tl.where(passes, 0.0, a), tl.where(passes, 0.0, b * test.zeta)
    if whole:
        tl.store(r_at, left_residual)
        tl.store(v_at, left_variance)
    else:
        tl.store(r_at, left_residual, mask=inside)
        tl.store(v_at, left_variance, mask=inside)
    return a, b, passes, tl.where(good, tl.where(passes, a.to(tl.int32, bitcast=True) & MAGNITUDE, 0), BAD), known


@triton.jit
def note(
    a, b, passes, bits, known, tile, slot, base, low, high, state, found, sums, plan,
    whole: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Writes down who passes in one tile."""
    lane = tl.arange(0, size)
    summary = tl.sum(passes.to(tl.int32) + ((bits > known).to(tl.int32) << 16))
    count = summary & 0xFFFF
    tl.store(found.count + tile, count)
    tl.store(found.known + tile, known)
    if summary >> 16 != 0:
        tl.atomic_max(sums.tops + slot * APART, tl.max(tl.where(bits == BAD, 0, bits)), sem="relaxed")
        if tl.max(bits) == BAD:
            tl.store(sums.bad, 1)
    if count != 0:
        tl.atomic_add(sums.asked + slot * APART + tile % APART, count, sem="relaxed")
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
            if whole:
                tl.store(state.residual + base + lane, a)
                tl.store(state.variance + base + lane, b)
            else:
                inside = (lane >= low) & (lane < high)
                tl.store(state.residual + base + lane, a, mask=inside)
                tl.store(state.variance + base + lane, b, mask=inside)
        tl.store(found.position + tile, position)


@triton.jit
def stream_kernel(
    grad, moment, state, cut, test, quantum, found, sums, plan, ragged,
    all_live: tl.constexpr, whole: tl.constexpr, size: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One program a tile: launched for all, where it takes the whole ones, and for those in `ragged`.

    What is below the window of the largest |r| that the tensor's tiles have found so far is certainly not sent, so it
    does not pass here. How much that catches depends on the order of the tiles; what is sent does not: `emit` drops
    the rest. (It saves `emit` from putting them back one by one: H200, ratio 10, 8 % below the window: 441 us to 135.)
    """
    tile = tl.program_id(0) if whole else tl.load(ragged + tl.program_id(0))
    base = tl.multiple_of(tl.load(cut.base + tile), 32)
    low, high = tl.load(cut.low + tile), tl.load(cut.high + tile)
    slot = tl.load(cut.slot + tile // group)
    if (high - low == size) == whole:
        live = True
        if not all_live:
            live = tl.load(cut.live + slot) != 0
        if live & (high > low):
            a, b, passes, bits, known = accumulate(
                grad, moment, state, base, low, high, sums.tops + slot * APART, test, quantum, whole, size
            )
            note(a, b, passes, bits, known, tile, slot, base, low, high, state, found, sums, plan, whole, size)
        else:
            tl.store(found.count + tile, 0)
            tl.store(found.known + tile, 0)


@triton.jit
def classify_kernel(
    state, cut, test, quantum, found, sums, plan, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr
):
    """One program a group: how many of each class are in each of its tiles; rows are tiles, columns candidates.

    Where there is room for all, and a tile knew the tensor's exponent, all its candidates are sent: nobody looks at
    them, and all are counted as class 0 (`emit` counts the codes then).
    """
    number = tl.program_id(0)
    slot = tl.load(cut.slot + number)
    row, column = number * group + tl.arange(0, group), tl.arange(0, CLASSES)
    count, known = tl.load(found.count + row), tl.load(found.known + row)
    position = tl.load(found.position + row, mask=count > 0, other=0)
    top = exponent_of(tl.load(sums.tops + slot * APART), quantum)
    unsure, short = count > 0, is_short(slot, sums, plan)
    if not short:
        if quantum.hybrid:
            unsure = count < 0
        else:
            unsure &= exponent_of(known, quantum) != top
    kept = tl.where(unsure & (position != SPILLED), count, 0)
    if not short:
        doubtful = unsure | ((count > 0) & (position == SPILLED))
        tl.store(plan.sure + number, (tl.max(doubtful.to(tl.int32)) == 0).to(tl.int32))
    else:
        tl.store(plan.sure + number, 0)
    packed = tl.zeros((group, lanes), tl.int64)
    lane = tl.arange(0, lanes)[None, :]
    ahead = tl.load(found.residual + position[:, None] + lane, mask=lane < kept[:, None], other=0.0)
    for _done in tl.range(0, tl.max(kept), lanes):
        r, have = ahead, lane < kept[:, None]
        lane += lanes
        ahead = tl.load(found.residual + position[:, None] + lane, mask=lane < kept[:, None], other=0.0)
        classes = class_of(r.to(tl.int32, bitcast=True), top, quantum)
        packed += tally(classes, have & (classes < DROPPED))
    histogram = counters(packed)
    histogram += tl.where((column == 0)[None, :] & (unsure == 0)[:, None], count[:, None], 0)
    if tl.max((unsure & (position == SPILLED)).to(tl.int32)) != 0:
        for tile in tl.range(number * group, number * group + group):
            if tl.sum(tl.where((row == tile) & unsure & (position == SPILLED), 1, 0)) != 0:
                for start in tl.range(0, size, SPAN):
                    classes, _r, _v, _inside = spilled_part(tile, start, top, state, cut, test, quantum)
                    histogram += tl.where((row == tile)[:, None], census(classes)[None, :], 0)
    tl.store(plan.histogram + row[:, None] * CLASSES + column[None, :], histogram)
    whole = tl.sum(histogram, axis=0)
    tl.store(plan.by_group + number * CLASSES + column, whole)
    if tl.max(count) != 0:
        tl.atomic_add(sums.totals + slot * CLASSES + column, whole, sem="relaxed")

"""Steps 2 to 4 for CUDA: Triton kernels, of which only the first touches every element.

    stream     r += g, v += m, test; who passes gets r = v = 0 and is written down tile by tile, in the scratch
    classify   who is below the window gets r and v back; how many are sent; where room is short, how many a class
    share      per tensor: exponent, how many passed; where room is short which class is cut, where, and what is sent
    scan       where each group's words begin
    emit       the words; what is sent is settled
    emit_cut   the same where room is short, and who is not sent is put back; zeros after the last word
    put_back   undo: whoever is still written down gets r and v back

Where a density is wanted, `histogram` (scores.py) comes before them and reads every element, too.
The first two are here, the others in share.py and emit.py, the records in records.py, the launchers in encode.py.
A candidate is an element that passed. A tile that finds the scratch full is *spilled*: its r and v stay as accumulated
and later kernels test it again. Class 8 is below the window of 3 bits: not sent. Nothing waits for the host, no float
is added atomically, and no multiply and add is fused: every operation is rounded by itself, as in the reference.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.codec.gpu.records import (
    ALIGN,
    ALL,
    APART,
    BAD,
    CHOSEN,
    CLASSES,
    DROPPED,
    MAGNITUDE,
    SPAN,
    SPILLED,
    WINDOW,
    class_of,
    counters,
    exponent_of,
    is_live,
    is_short,
    least_sent,
    passing,
    spilled_part,
    summed,
    tally,
    total_of,
    variance_of,
    write,
)


@triton.jit
def accumulate(given, slot, state, base, low, high, sums, rule, whole: tl.constexpr, size: tl.constexpr):
    """(r + g, v + m, who passes, bits of |r| of those or BAD, the largest known) of one tile.

    r and v are written as if all that pass were sent.
    """
    lane = tl.arange(0, size)
    inside = None if whole else (lane >= low) & (lane < high)
    a, b, good = summed(given, state, lane, inside, base)
    # Read by an atomic, so that all threads see the same while other programs raise it.
    known = tl.atomic_max(sums.tops + slot * APART, 0, sem="relaxed")
    passes = passing(a, b, least_sent(known, rule), slot, rule)
    write(state, lane, tl.where(passes, 0.0, a), tl.where(passes, 0.0, b * rule.zeta), inside, base)
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
        taken = (count + 7) // 8  # the scratch is given out in eights
        eights = tl.atomic_add(sums.taken, taken.to(tl.int64), sem="relaxed")
        position = eights * 8
        if eights + taken <= tl.load(plan.numbers + 1):
            # Said to be contiguous so that the values stay in the threads that loaded them, and do not go through
            # shared memory first. The mask, different from lane to lane, keeps every store one element wide.
            at = tl.max_contiguous(tl.multiple_of(tl.cumsum(passes.to(tl.int32)) - 1, 4), 4)
            tl.store(found.place + position + at, lane.to(tl.int16), mask=passes)
            write(found, at, a, b, passes, position)
        else:
            position = position * 0 + SPILLED
            tl.debug_barrier()
            write(state, lane, a, b, None if whole else (lane >= low) & (lane < high), base)
        tl.store(found.position + tile, position)


@triton.jit
def stream_kernel(
    given, state, cut, rule, found, sums, plan, visit,
    whole: tl.constexpr, size: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One program a tile of `visit`; whole: they are all full.

    What is below the window of the largest |r| that the tensor's tiles have found so far is certainly not sent, so it
    does not pass here. How much that catches depends on the order of the tiles; what is sent does not: `classify`
    gives the rest back, one by one.
    """
    tile, slot = tl.load(visit.tile + tl.program_id(0)), tl.load(visit.slot + tl.program_id(0))
    base = tl.load(visit.base + tl.program_id(0)).to(tl.int64) * ALIGN
    low, high = 0, size
    if not whole:
        low, high = tl.load(cut.low + tile), tl.load(cut.high + tile)
    if is_live(cut, slot) & (high > low):
        a, b, passes, bits, known = accumulate(given, slot, state, base, low, high, sums, rule, whole, size)
        note(a, b, passes, bits, known, tile, slot, base, low, high, state, found, sums, plan, whole, size)
    else:
        tl.store(found.count + tile, 0)
        tl.store(found.known + tile, 0)


@triton.jit
def in_scratch(position, lane, kept):
    """Where the candidates lane [1, lanes] of tiles [rows] are in the scratch, and a mask to read them with.

    It is given out in eights, which the arithmetic tells the compiler: a thread reads 16 bytes at once. What is read
    after the last candidate is to be ignored.
    """
    return (position // 8 * 8)[:, None] + lane, lane < ((kept + 7) // 8 * 8)[:, None]


@triton.jit
def drop_below(
    position, kept, top, state, base, rule, found, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr
):
    """Gives r and v back to candidates below the window, of the first `kept` of every tile; how many, [group].

    Scattered writes: H200, 64 tensors, ratio 10, 3 % of the candidates: 90 us.
    """
    below = tl.zeros((group, lanes), tl.int32)
    for start in tl.range(0, tl.max(kept), lanes):
        lane = start + tl.arange(0, lanes)[None, :]
        source, mask = in_scratch(position, lane, kept)
        r = tl.load(found.residual + source, mask=mask, other=0.0)
        left = (class_of(r.to(tl.int32, bitcast=True), top, rule) == DROPPED) & (lane < kept[:, None])
        below += left.to(tl.int32)
        place, v = tl.load(found.place + source, mask=left, other=0), variance_of(found, source, left)
        # Said to be contiguous so that the values stay in the threads that read them; the mask keeps stores narrow.
        at = tl.multiple_of((tl.arange(0, group) * size)[:, None] + place, (1, 4))
        at = tl.max_contiguous(at, (1, 4))
        write(state, at, r, v * rule.zeta, left, base)
        tl.debug_barrier()  # should another thread mark the place than has read it
        tl.store(found.place + source, tl.full((group, lanes), -1, tl.int16), mask=left)
    return tl.sum(below, axis=1)


@triton.jit
def n_of_classes(
    number, slot, count, position, top, state, cut, rule, found,
    size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """How many candidates of each class are in each tile of a group, [group, 8]."""
    row, kept = number * group + tl.arange(0, group), tl.where(position != SPILLED, count, 0)
    packed = tl.zeros((group, lanes), tl.int64)
    for start in tl.range(0, tl.max(kept), lanes):
        lane = start + tl.arange(0, lanes)[None, :]
        source, mask = in_scratch(position, lane, kept)
        r = tl.load(found.residual + source, mask=mask, other=0.0)
        classes = class_of(r.to(tl.int32, bitcast=True), top, rule)
        packed += tally(classes, (lane < kept[:, None]) & (classes < DROPPED))
    histogram = counters(packed)
    if tl.min(position) == SPILLED:
        for tile in tl.range(number * group, number * group + group):
            if tl.sum(tl.where((row == tile) & (position == SPILLED), 1, 0)) != 0:
                for start in tl.range(0, size, SPAN):
                    classes, _r, _v, _inside = spilled_part(tile, slot, start, top, state, cut, rule)
                    counted = total_of(tally(classes, classes < DROPPED), SPAN)
                    histogram += tl.where((row == tile)[:, None], counted[None, :], 0)
    return histogram


@triton.jit
def classify_kernel(state, cut, rule, found, sums, plan, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr):
    """One program a group: how many candidates its tiles send; rows are tiles, columns candidates.

    If a tile knew the tensor's exponent, all of them, and nobody looks at them; if not, those in the window. Where room
    is short, or a tile was spilled, how many there are of each class, for `share` to choose.
    """
    number = tl.program_id(0)
    slot = tl.load(cut.slot + number)
    row, column = number * group + tl.arange(0, group), tl.arange(0, CLASSES)
    count, known = tl.load(found.count + row), tl.load(found.known + row)
    position = tl.load(found.position + row, mask=count > 0, other=0)
    top = exponent_of(tl.load(sums.tops + slot * APART), rule)
    if is_short(slot, sums, plan) | (tl.min(position) == SPILLED):
        histogram = n_of_classes(number, slot, count, position, top, state, cut, rule, found, size, group, lanes)
        tl.store(plan.histogram + row[:, None] * CLASSES + column[None, :], histogram)
        tl.store(plan.kind + number, CHOSEN)
        whole = tl.sum(histogram, axis=0)
    else:
        tl.store(plan.kind + number, ALL)
        if not rule.hybrid:
            kept = tl.where(exponent_of(known, rule) != top, count, 0)
            if tl.max(kept) != 0:
                base = tl.multiple_of(tl.load(cut.base + number * group), ALIGN)
                count -= drop_below(position, kept, top, state, base, rule, found, size, group, lanes)
                tl.debug_barrier()
                tl.store(plan.kind + number, WINDOW)
        tl.store(plan.before + row, tl.cumsum(count) - count)
        whole = tl.where(column == 0, tl.sum(count), 0)
    total = tl.sum(whole)
    tl.store(plan.by_group + number * CLASSES + column, whole)
    tl.store(plan.begin + number, total)
    if total != 0:
        tl.atomic_add(sums.totals + slot * CLASSES + column, whole, sem="relaxed")

"""Steps 3 and 4 for CUDA, second half: who has room, where the words go, and the undo. See triton_encode.py."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,type-arg"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gradwire.kernels.triton_encode import (
    CLASSES,
    DROPPED,
    NOTHING,
    SPAN,
    SPILLED,
    State,
    class_of,
    exponent_of,
    limits_of,
    overlap,
    spilled_part,
)


class Report(NamedTuple):
    """What `Selection` holds."""

    words: Any
    counts: Any
    codes: Any
    exponents: Any
    passed: Any
    finite: Any


@triton.jit
def count_before(
    slot, last, start, top, state, cut, test, quantum, found, plan, size: tl.constexpr, group: tl.constexpr
):
    """How many of tensor `slot`'s class `last` lie before the flat place `start`: whole groups, tiles, candidates."""
    first, stop = tl.load(cut.first_of_slot + slot), tl.load(cut.first_of_slot + slot + 1)
    holder, before = first - 1, 0
    for at in tl.range(first, stop, 256):
        number = at + tl.arange(0, 256)
        ours = number < stop
        begin = tl.load(cut.base + number * group, mask=ours, other=0)
        begin += tl.load(cut.low + number * group, mask=ours, other=0)
        ours &= begin <= start
        before += tl.sum(tl.load(plan.by_group + number * CLASSES + last, mask=ours, other=0))
        holder += tl.sum(ours.to(tl.int32))
    before -= tl.load(plan.by_group + holder * CLASSES + last)
    row = holder * group + tl.arange(0, group)
    ours = tl.load(cut.base + row) + tl.load(cut.low + row) <= start
    before += tl.sum(tl.load(plan.histogram + row * CLASSES + last, mask=ours, other=0))
    tile = holder * group + tl.sum(ours.to(tl.int32)) - 1
    before -= tl.load(plan.histogram + tile * CLASSES + last)
    base, count = tl.load(cut.base + tile), tl.load(found.count + tile)
    position = tl.load(found.position + tile, mask=count > 0, other=0)
    for begin in tl.range(0, tl.where(position == SPILLED, size, count), SPAN):
        lane = begin + tl.arange(0, SPAN)
        if position == SPILLED:
            classes, _, _, _ = spilled_part(tile, begin, top, state, cut, test, quantum)
            before += tl.sum(((classes == last) & (base + lane < start)).to(tl.int32))
        else:
            have = lane < count
            place = tl.load(found.place + position + lane, mask=have, other=0)
            r = tl.load(found.residual + position + lane, mask=have, other=0.0)
            classes = class_of(r.to(tl.int32, bitcast=True), top, quantum)
            before += tl.sum((have & (classes == last) & (base + place < start)).to(tl.int32))
    return before


@triton.jit
def share_kernel(state, cut, test, quantum, found, sums, plan, report, size: tl.constexpr, group: tl.constexpr):
    """One program a tensor: exponent, passed, codes; if it has no room for all: which class is cut, and where."""
    slot, column = tl.program_id(0), tl.arange(0, CLASSES)
    largest, asked = tl.load(sums.tops + slot), tl.load(sums.totals + slot * CLASSES + column)
    top = exponent_of(largest, quantum)
    capacity = tl.load(plan.numbers + 2 + slot)
    passed = tl.sum(asked)
    last = tl.sum((tl.cumsum(asked) <= capacity).to(tl.int32))  # the class that does not fit whole; 8: all fit
    room = (capacity - tl.sum(tl.where(column < last, asked, 0))).to(tl.int32)
    total = tl.sum(tl.where(column == last, asked, 0))
    before = 0
    if last < CLASSES:
        tl.store(sums.bad + 1, 1)
        start = tl.load(cut.offset + slot) + tl.load(plan.numbers) % tl.load(cut.length + slot)
        before = count_before(slot, last, start, top, state, cut, test, quantum, found, plan, size, group)
    at = plan.limits + slot * 4
    tl.store(at, last)
    tl.store(at + 1, room)
    tl.store(at + 2, before)
    tl.store(at + 3, total)
    sent = tl.where(column < last, asked, tl.where(column == last, room, 0))
    exponent = tl.where(largest > 0, top - 127, NOTHING)
    if quantum.hybrid:
        sent = tl.where(column == 0, tl.sum(sent), 0)
        exponent = NOTHING
    tl.store(report.codes + slot * CLASSES + column, sent)
    tl.store(report.exponents + slot, exponent)
    tl.store(report.passed + slot, tl.where(tl.load(cut.live + slot) != 0, passed, -1))


@triton.jit
def scan_kernel(cut, sums, plan, report, n_groups, n_chunks, width: tl.constexpr):
    """One program: where the words of each group begin, and how many each chunk has."""
    column = tl.arange(0, CLASSES)[None, :]
    carry = 0
    if tl.load(sums.bad + 1) != 0:
        for start in tl.range(0, n_groups, width):
            number = start + tl.arange(0, width)
            ours = number < n_groups
            last = tl.load(plan.limits + tl.load(cut.slot + number, mask=ours, other=0) * 4, mask=ours, other=DROPPED)
            partial = tl.load(plan.by_group + number * CLASSES + last, mask=ours & (last < CLASSES), other=0)
            tl.store(plan.prefix + number, carry + tl.cumsum(partial) - partial, mask=ours)
            carry += tl.sum(partial)
        tl.debug_barrier()
    carry = 0
    for start in tl.range(0, n_groups, width):
        number = start + tl.arange(0, width)
        ours = number < n_groups
        slot = tl.load(cut.slot + number, mask=ours, other=0)
        last, room, before, total = limits_of(plan, slot)
        classes = tl.load(plan.by_group + number[:, None] * CLASSES + column, mask=ours[:, None], other=0)
        sent = tl.sum(tl.where(column < last[:, None], classes, 0), axis=1)
        cut_short = ours & (last < CLASSES)
        partial = tl.sum(tl.where(column == last[:, None], classes, 0), axis=1)
        prefix = tl.load(plan.prefix + number, mask=cut_short, other=0)
        prefix -= tl.load(plan.prefix + tl.load(cut.first_of_slot + slot), mask=cut_short, other=0)
        sent += tl.where(cut_short, overlap(prefix, partial, (last, room, before, total)), 0)
        tl.store(plan.begin + number, carry + tl.cumsum(sent) - sent, mask=ours)
        carry += tl.sum(sent)
    tl.store(plan.begin + n_groups, carry)
    tl.store(report.finite, (tl.load(sums.bad) == 0).to(tl.int8))
    tl.debug_barrier()
    for start in tl.range(0, n_chunks, width):
        number = start + tl.arange(0, width)
        ours = number < n_chunks
        begin = tl.load(plan.begin + tl.load(cut.first_of_chunk + number, mask=ours, other=0), mask=ours, other=0)
        end = tl.load(plan.begin + tl.load(cut.first_of_chunk + number + 1, mask=ours, other=0), mask=ours, other=0)
        tl.store(report.counts + number, end - begin, mask=ours)


@triton.jit
def settle(at, r, v, bits, classes, sent, top, state, quantum, feedback: tl.constexpr):
    """r and v of the sent elements after the send; r = v = 0 is already written."""
    if quantum.hybrid:
        value = tl.where(bits < 0, -quantum.tau, quantum.tau)
        tl.store(state.residual + at, r - value, mask=sent)
        tl.store(
            state.variance + at, tl.maximum(v - tl.abs(r) * 2.0 * quantum.tau + quantum.tau_square, 0.0), mask=sent
        )
    elif feedback:
        value = ((top - classes) << 23).to(tl.float32, bitcast=True)
        rest = r - tl.where(bits < 0, -value, value)
        tl.store(state.residual + at, rest, mask=sent)
        tl.store(state.variance + at, rest * rest, mask=sent)


@triton.jit
def word_of(bits, classes, place, quantum):
    """Sign, d and the place within its chunk."""
    sign = bits & -0x80000000
    if quantum.hybrid:
        return sign | place
    return sign | (classes << 28) | place


@triton.jit
def choose(classes, counted, prefix, limits):
    """Who is sent, and how many before it in its tile.

    counted: candidates before it in its tile, those of whole classes | those of the class that is cut << 16.
    """
    ordinal = prefix + (counted >> 16)
    chosen = (classes == limits[0]) & (classes < CLASSES) & (overlap(ordinal, 1, limits) > 0)
    return (classes < limits[0]) | chosen, (counted & 0xFFFF) + overlap(prefix, counted >> 16, limits)


@triton.jit
def steps_of(classes, last):
    """What `choose` counts."""
    return (classes < last).to(tl.int32) + (((classes == last) & (classes < CLASSES)).to(tl.int32) << 16)


@triton.jit
def emit_spilled(
    tile, n_sent, begin, prefix, origin, top, limits, state, cut, test, quantum, found, sums, plan, words,
    feedback: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """A tile that is not in the scratch: its sent elements go to the reserve, for the undo, and it counts as stored."""
    base = tl.load(cut.base + tile)
    position = tl.load(plan.numbers + 1) + tl.atomic_add(sums.taken + 1, n_sent.to(tl.int64), sem="relaxed")
    carry = 0
    for start in tl.range(0, size, SPAN):
        lane = start + tl.arange(0, SPAN)
        classes, r, v, inside = spilled_part(tile, start, top, state, cut, test, quantum)
        bits = r.to(tl.int32, bitcast=True)
        step = steps_of(classes, limits[0])
        sent, number = choose(classes, carry + tl.cumsum(step) - step, prefix, limits)
        carry += tl.sum(step)
        word = word_of(bits, classes, origin + lane, quantum)
        tl.store(words + begin + number, word, mask=sent)
        tl.store(found.place + position + number, lane.to(tl.int16), mask=sent)
        tl.store(found.residual + position + number, r, mask=sent)
        tl.store(found.variance + position + number, v, mask=sent)
        tl.store(state.residual + base + lane, 0.0, mask=sent)
        tl.store(state.variance + base + lane, tl.where(sent, 0.0, v * test.zeta), mask=inside)
        tl.debug_barrier()
        settle(base + lane, r, v, bits, classes, sent, top, state, quantum, feedback)
    tl.store(found.position + tile, position)
    tl.store(found.count + tile, n_sent)


@triton.jit
def candidates(found, source, have):
    return tl.load(found.place + source, mask=have, other=0), tl.load(found.residual + source, mask=have, other=0.0)


@triton.jit
def emit_kernel(
    state, cut, test, quantum, found, sums, plan, words,
    feedback: tl.constexpr, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One program a group: rows are tiles, columns candidates."""
    number = tl.program_id(0)
    row, column = number * group + tl.arange(0, group), tl.arange(0, CLASSES)[None, :]
    count = tl.load(found.count + row)
    if tl.max(count) != 0:
        slot, base = tl.load(cut.slot + number), tl.load(cut.base + number * group)
        here = State(state.residual + base, state.variance + base)
        origin = (base - tl.load(cut.origin + number)).to(tl.int32)
        top, limits = exponent_of(tl.load(sums.tops + slot), quantum), limits_of(plan, slot)
        last = limits[0]
        position = tl.load(found.position + row, mask=count > 0, other=0)
        histogram = tl.load(plan.histogram + row[:, None] * CLASSES + column)
        partial = tl.sum(tl.where(column == last, histogram, 0), axis=1)
        prefix = tl.cumsum(partial) - partial
        if last < CLASSES:
            prefix += tl.load(plan.prefix + number) - tl.load(plan.prefix + tl.load(cut.first_of_slot + slot))
        n_sent = tl.sum(tl.where(column < last, histogram, 0), axis=1) + overlap(prefix, partial, limits)
        begin = tl.load(plan.begin + number) + tl.cumsum(n_sent) - n_sent
        kept = tl.where(position != SPILLED, count, 0)
        carry = tl.zeros((group,), tl.int32)
        lane = tl.arange(0, lanes)[None, :]
        next_place, next_residual = candidates(found, position[:, None] + lane, lane < kept[:, None])
        for _done in tl.range(0, tl.max(kept), lanes):
            place, r, have, source = next_place, next_residual, lane < kept[:, None], position[:, None] + lane
            lane += lanes
            next_place, next_residual = candidates(found, source + lanes, lane < kept[:, None])
            bits = r.to(tl.int32, bitcast=True)
            classes = tl.where(have, class_of(bits, top, quantum), DROPPED)
            step = steps_of(classes, last)
            counted = carry[:, None] + tl.cumsum(step, axis=1) - step
            carry += tl.sum(step, axis=1)
            sent, before = choose(classes, counted, prefix[:, None], limits)
            left = have & (sent == 0)
            # Said to be contiguous along a row so that a warp keeps to its row; masks keep stores one element wide.
            at = tl.max_contiguous((tl.arange(0, group) * size)[:, None] + place, (1, 2))
            to = tl.max_contiguous(begin[:, None] + before, (1, 2))
            tl.store(words + to, word_of(bits, classes, origin + at, quantum), mask=sent)
            v = tl.load(found.variance + source, mask=have if quantum.hybrid else left, other=0.0)
            tl.store(here.residual + at, r, mask=left)
            tl.store(here.variance + at, v * test.zeta, mask=left)
            tl.store(found.place + source, tl.full((group, lanes), -1, tl.int16), mask=left)
            settle(at, r, v, bits, classes, sent, top, here, quantum, feedback)
        if tl.min(position) == SPILLED:
            for tile in tl.range(number * group, number * group + group):
                if tl.sum(tl.where((row == tile) & (position == SPILLED), 1, 0)) != 0:
                    its_count = tl.sum(tl.where(row == tile, n_sent, 0))
                    its_begin = tl.sum(tl.where(row == tile, begin, 0))
                    its_prefix = tl.sum(tl.where(row == tile, prefix, 0))
                    emit_spilled(
                        tile, its_count, its_begin, its_prefix, origin + (tile - number * group) * size, top, limits, state, cut, test, quantum, found,
                        sums, plan, words, feedback, size,
                    )  # fmt: skip


@triton.jit
def clear_kernel(words, plan, n_groups, n_words, width: tl.constexpr):
    """Zeros after the last word. A loop of few programs: how many are to be written is known on the device alone."""
    begin = tl.load(plan.begin + n_groups) + tl.program_id(0) * width
    for at in tl.range(begin, n_words, tl.num_programs(0) * width):
        place = at + tl.arange(0, width)
        tl.store(words + place, tl.zeros((width,), tl.int32), mask=place < n_words)


@triton.jit
def put_back_kernel(state, cut, found, size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr):
    """Undo, one program a group."""
    row = tl.program_id(0) * group + tl.arange(0, group)
    count = tl.load(found.count + row)
    position = tl.load(found.position + row, mask=count > 0, other=0)
    base = tl.load(cut.base + tl.program_id(0) * group)
    for start in tl.range(0, tl.max(count), lanes):
        lane = start + tl.arange(0, lanes)[None, :]
        source = position[:, None] + lane
        place = tl.load(found.place + source, mask=lane < count[:, None], other=-1)
        sent = place >= 0
        r = tl.load(found.residual + source, mask=sent, other=0.0)
        v = tl.load(found.variance + source, mask=sent, other=0.0)
        at = tl.max_contiguous((tl.arange(0, group) * size)[:, None] + place, (1, 2))
        tl.store(state.residual + base + at, r, mask=sent)
        tl.store(state.variance + base + at, v, mask=sent)

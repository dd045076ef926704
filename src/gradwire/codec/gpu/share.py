"""Steps 3 and 4 for CUDA: who has room, and where the words go. See stream.py."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.codec.gpu.records import (
    APART,
    CHUNKS,
    CLASSES,
    NOTHING,
    SPAN,
    SPILLED,
    class_of,
    exponent_of,
    is_live,
    is_short,
    overlap,
    spilled_part,
)

GROUPS = tl.constexpr(1024)  # of a tensor, looked at together


@triton.jit
def groups_before(slot, last, start, cut, plan, group: tl.constexpr):
    """How many of class `last` are in the tensor's groups before each, into plan.prefix.

    Returns the group that has the flat place `start`.
    """
    first, stop = tl.load(cut.first_of_slot + slot), tl.load(cut.first_of_slot + slot + 1)
    holder, carry = first - 1, 0
    for at in tl.range(first, stop, GROUPS):
        number = at + tl.arange(0, GROUPS)
        ours = number < stop
        partial = tl.load(plan.by_group + number * CLASSES + last, mask=ours, other=0)
        tl.store(plan.prefix + number, carry + tl.cumsum(partial) - partial, mask=ours)
        carry += tl.sum(partial)
        begin = tl.load(cut.base + number * group, mask=ours, other=0)
        begin += tl.load(cut.low + number * group, mask=ours, other=0)
        holder += tl.sum((ours & (begin <= start)).to(tl.int32))
    tl.debug_barrier()
    return holder


@triton.jit
def count_before(slot, last, start, top, state, cut, rule, found, plan, size: tl.constexpr, group: tl.constexpr):
    """How many of tensor `slot`'s class `last` lie before the flat place `start`: whole groups, tiles, candidates."""
    holder = groups_before(slot, last, start, cut, plan, group)
    before = tl.load(plan.prefix + holder)
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
            classes, _r, _v, _inside = spilled_part(tile, slot, begin, top, state, cut, rule)
            before += tl.sum(((classes == last) & (base + lane < start)).to(tl.int32))
        else:
            have = lane < count
            place = tl.load(found.place + position + lane, mask=have, other=0)
            r = tl.load(found.residual + position + lane, mask=have, other=0.0)
            classes = class_of(r.to(tl.int32, bitcast=True), top, rule)
            before += tl.sum((have & (classes == last) & (base + place < start)).to(tl.int32))
    return before


@triton.jit
def sent_of_groups(slot, limits, cut, plan):
    """How many words the groups of a tensor have that is cut short."""
    column = tl.arange(0, CLASSES)[None, :]
    stop = tl.load(cut.first_of_slot + slot + 1)
    for at in tl.range(tl.load(cut.first_of_slot + slot), stop, GROUPS):
        number = at + tl.arange(0, GROUPS)
        ours = number < stop
        classes = tl.load(plan.by_group + number[:, None] * CLASSES + column, mask=ours[:, None], other=0)
        partial = tl.sum(tl.where(column == limits[0], classes, 0), axis=1)
        prefix = tl.load(plan.prefix + number, mask=ours, other=0)
        sent = tl.sum(tl.where(column < limits[0], classes, 0), axis=1) + overlap(prefix, partial, limits)
        tl.store(plan.begin + number, sent, mask=ours)


@triton.jit
def share_kernel(state, cut, rule, found, sums, plan, report, size: tl.constexpr, group: tl.constexpr):
    """One program a tensor: exponent, passed, codes; if it has no room for all: which class is cut, and where."""
    slot, column = tl.program_id(0), tl.arange(0, CLASSES)
    largest, asked = tl.load(sums.tops + slot * APART), tl.load(sums.totals + slot * CLASSES + column)
    top = exponent_of(largest, rule)
    capacity = tl.load(plan.numbers + 2 + slot)
    passed = tl.sum(asked)
    last = tl.sum((tl.cumsum(asked) <= capacity).to(tl.int32))  # the class that does not fit whole; 8: all fit
    room = (capacity - tl.sum(tl.where(column < last, asked, 0))).to(tl.int32)
    total = tl.sum(tl.where(column == last, asked, 0))
    before = 0
    if last < CLASSES:
        offset = tl.load(cut.end + slot - 1, mask=slot > 0, other=0)
        start = offset + tl.load(plan.numbers) % (tl.load(cut.end + slot) - offset)
        before = count_before(slot, last, start, top, state, cut, rule, found, plan, size, group)
        sent_of_groups(slot, (last, room, before, total), cut, plan)
    at = plan.limits + slot * 4
    tl.store(at, last)
    tl.store(at + 1, room)
    tl.store(at + 2, before)
    tl.store(at + 3, total)
    sent = tl.where(column < last, asked, tl.where(column == last, room, 0))
    if not is_short(slot, sums, plan):  # then `emit` counts them
        sent = tl.zeros_like(sent)
    exponent = tl.where(largest > 0, top - 127, NOTHING)
    if rule.hybrid:
        sent = tl.where(column == 0, tl.sum(sent), 0)
        exponent = NOTHING
    tl.store(report.codes + slot * CLASSES + column, sent)
    tl.store(report.exponents + slot, exponent)
    tl.store(report.passed + slot, tl.where(is_live(cut, slot), passed, -1))


@triton.jit
def scan_kernel(cut, sums, plan, report, n_groups, n_chunks, width: tl.constexpr):
    """One program: where the words of each group begin, and how many each chunk has."""
    carry = 0
    for start in tl.range(0, n_groups, width):
        number = start + tl.arange(0, width)
        ours = number < n_groups
        sent = tl.load(plan.begin + number, mask=ours, other=0)
        tl.store(plan.begin + number, carry + tl.cumsum(sent) - sent, mask=ours)
        carry += tl.sum(sent)
    tl.store(plan.begin + n_groups, carry)
    tl.store(report.finite, (tl.load(sums.bad) == 0).to(tl.int8))
    tl.debug_barrier()
    for start in tl.range(0, n_chunks, CHUNKS):
        number = start + tl.arange(0, CHUNKS)
        ours = number < n_chunks
        begin = tl.load(plan.begin + tl.load(cut.first_of_chunk + number, mask=ours, other=0), mask=ours, other=0)
        end = tl.load(plan.begin + tl.load(cut.first_of_chunk + number + 1, mask=ours, other=0), mask=ours, other=0)
        tl.store(report.counts + number, end - begin, mask=ours)

"""Step 4 for CUDA: the words, what is left of the sent elements, and the undo. See stream.py."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.codec.gpu.records import (
    ALL,
    APART,
    CHOSEN,
    CLASSES,
    DROPPED,
    SPAN,
    SPILLED,
    WINDOW,
    class_of,
    exponent_of,
    is_short,
    limits_of,
    overlap,
    read,
    spilled_part,
    tally,
    total_of,
    variance_of,
    write,
)

CLEARED = tl.constexpr(1024)  # words at a time of `clear`


@triton.jit
def settle(at, r, v, bits, classes, sent, top, state, base, rule):
    """r and v of the sent elements after the send; r = v = 0 is already written."""
    if rule.hybrid or rule.feedback:
        size = rule.tau if rule.hybrid else ((top - classes) << 23).to(tl.float32, bitcast=True)
        rest = r - tl.where(bits < 0, -size, size)
        if rule.hybrid:
            write(state, at, rest, tl.maximum(v - tl.abs(r) * 2.0 * rule.tau + rule.tau_square, 0.0), sent, base)
        else:
            write(state, at, rest, rest * rest, sent, base)


@triton.jit
def word_of(bits, classes, place, rule):
    """Sign, d and the place within its chunk."""
    sign = bits & -0x80000000
    if rule.hybrid:
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
    tile, slot, n_sent, begin, prefix, origin, top, limits, state, cut, rule, found, sums, plan, words,
    size: tl.constexpr,
):  # fmt: skip
    """A tile that is not in the scratch: its sent elements go to the reserve, for the undo, and it counts as stored.

    Returns how many were sent of each class, [8].
    """
    base = tl.load(cut.base + tile)
    position = tl.load(plan.numbers + 1) * 8 + tl.atomic_add(sums.taken + 1, n_sent.to(tl.int64), sem="relaxed")
    carry, codes = 0, tl.zeros((CLASSES,), tl.int32)
    for start in tl.range(0, size, SPAN):
        lane = start + tl.arange(0, SPAN)
        classes, r, v, inside = spilled_part(tile, slot, start, top, state, cut, rule)
        bits = r.to(tl.int32, bitcast=True)
        step = steps_of(classes, limits[0])
        sent, number = choose(classes, carry + tl.cumsum(step) - step, prefix, limits)
        carry += tl.sum(step)
        codes += total_of(tally(classes, sent), SPAN)
        word = word_of(bits, classes, origin + lane, rule)
        tl.store(words + begin + number, word, mask=sent)
        tl.store(found.place + position + number, lane.to(tl.int16), mask=sent)
        write(found, number, r, v, sent, position)
        write(state, lane, tl.where(sent, 0.0, r), tl.where(sent, 0.0, v * rule.zeta), inside, base)
        tl.debug_barrier()
        settle(lane, r, v, bits, classes, sent, top, state, base, rule)
    tl.store(found.position + tile, position)
    tl.store(found.count + tile, n_sent)
    return codes


@triton.jit
def candidates(found, source, have):
    """Place and r. Places as int32: carried from round to round as int16 they would be packed and unpacked."""
    place = tl.load(found.place + source, mask=have, other=0)
    return place.to(tl.int32), tl.load(found.residual + source, mask=have, other=0.0)


@triton.jit
def emit_rows(
    position, kept, begin, prefix, origin, top, limits, state, base, rule, found, words,
    whom: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Candidates of tiles that are in the scratch. whom: ALL, those still in the WINDOW, or those CHOSEN by `limits`.

    Returns the tally of what was sent. The candidates of the next round are on their way while one round is written.
    """
    packed, carry = tl.zeros((rows, lanes), tl.int64), tl.zeros((rows,), tl.int32)
    lane = tl.arange(0, lanes)[None, :]
    next_place, next_residual = candidates(found, position[:, None] + lane, lane < kept[:, None])
    for _done in tl.range(0, tl.max(kept), lanes):
        place, r, have, source = next_place, next_residual, lane < kept[:, None], position[:, None] + lane
        next_place, next_residual = candidates(found, source + lanes, lane + lanes < kept[:, None])
        bits = r.to(tl.int32, bitcast=True)
        classes = class_of(bits, top, rule)
        # Said to be contiguous along a row so that a warp keeps to its row; masks keep stores one element wide.
        at = tl.max_contiguous((tl.arange(0, rows) * size)[:, None] + place, (1, 2))
        if whom == ALL:
            sent, to = have, begin[:, None] + lane
        elif whom == WINDOW:
            sent = have & (place >= 0)
            to = tl.max_contiguous(begin[:, None] + carry[:, None] + tl.cumsum(sent.to(tl.int32), axis=1) - 1, (1, 2))
            carry += tl.sum(sent.to(tl.int32), axis=1)
        else:
            classes = tl.where(have, classes, DROPPED)
            step = steps_of(classes, limits[0])
            sent, before = choose(classes, carry[:, None] + tl.cumsum(step, axis=1) - step, prefix[:, None], limits)
            carry += tl.sum(step, axis=1)
            to = tl.max_contiguous(begin[:, None] + before, (1, 2))
        tl.store(words + to, word_of(bits, classes, origin + at, rule), mask=sent)
        packed += tally(classes, sent)
        if whom == CHOSEN:
            left = have & (sent == 0)
            write(state, at, r, variance_of(found, source, left) * rule.zeta, left, base)
            tl.store(found.place + source, tl.full((rows, lanes), -1, tl.int16), mask=left)
        settle(at, r, variance_of(found, source, sent), bits, classes, sent, top, state, base, rule)
        lane += lanes
    return packed


@triton.jit
def add_codes(sent, slot, rule, report):
    """sent [8]: of each class."""
    column = tl.arange(0, CLASSES)
    codes = tl.where(column == 0, tl.sum(sent), 0) if rule.hybrid else sent
    tl.atomic_add(report.codes + slot * CLASSES + column, codes, sem="relaxed")


@triton.jit
def emit_kernel(
    state, cut, rule, found, sums, plan, report,
    size: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One program for `rows` tiles of a group from which nobody has to choose; columns are candidates.

    Apart from `emit_cut_kernel`, which needs twice the registers: here it counts how many programs run at a time.
    """
    number, first = tl.program_id(0) * rows // group, tl.program_id(0) * rows % group
    row = number * group + first + tl.arange(0, rows)
    count, kind = tl.load(found.count + row), tl.load(plan.kind + number)
    if (kind != CHOSEN) & (tl.max(count) != 0):
        slot, base = tl.load(cut.slot + number), tl.load(cut.base + number * group)
        origin = (base - tl.load(cut.origin + number)).to(tl.int32) + first * size
        base += first * size
        top = exponent_of(tl.load(sums.tops + slot * APART), rule)
        position = tl.load(found.position + row, mask=count > 0, other=0)
        begin = tl.load(plan.begin + number) + tl.load(plan.before + row)
        limits = (8, 0, 0, 0)
        if kind == ALL:
            packed = emit_rows(
                position, count, begin, begin, origin, top, limits, state, base, rule, found, report.words,
                ALL, size, rows, lanes,
            )  # fmt: skip
        else:
            packed = emit_rows(
                position, count, begin, begin, origin, top, limits, state, base, rule, found, report.words,
                WINDOW, size, rows, lanes,
            )  # fmt: skip
        add_codes(total_of(packed, rows * size), slot, rule, report)


@triton.jit
def clear(words, begin, n_words, width: tl.constexpr):
    """Zeros after the last word. A loop: how many are to be written is known on the device alone."""
    for at in tl.range(begin + tl.program_id(0) * width, n_words, tl.num_programs(0) * width):
        place = at + tl.arange(0, width)
        tl.store(words + place, tl.zeros((width,), tl.int32), mask=place < n_words)


@triton.jit
def emit_cut_kernel(
    state, cut, rule, found, sums, plan, report, n_words,
    size: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """As `emit_kernel`, one program a group, for the other groups: without room for all, or with tiles spilled.

    And zeros after the last word.
    """
    number = tl.program_id(0)
    clear(report.words, tl.load(plan.begin + tl.num_programs(0)), n_words, CLEARED)
    if tl.load(plan.kind + number) == CHOSEN:
        row, column = number * group + tl.arange(0, group), tl.arange(0, CLASSES)
        count = tl.load(found.count + row)
        slot, base = tl.load(cut.slot + number), tl.load(cut.base + number * group)
        origin = (base - tl.load(cut.origin + number)).to(tl.int32)
        top, limits = exponent_of(tl.load(sums.tops + slot * APART), rule), limits_of(plan, slot)
        last = limits[0]
        position = tl.load(found.position + row, mask=count > 0, other=0)
        histogram = tl.load(plan.histogram + row[:, None] * CLASSES + column[None, :])
        partial = tl.sum(tl.where(column[None, :] == last, histogram, 0), axis=1)
        prefix = tl.cumsum(partial) - partial
        if last < CLASSES:
            prefix += tl.load(plan.prefix + number)
        n_sent = tl.sum(tl.where(column[None, :] < last, histogram, 0), axis=1) + overlap(prefix, partial, limits)
        begin = tl.load(plan.begin + number) + tl.cumsum(n_sent) - n_sent
        kept = tl.where(position != SPILLED, count, 0)
        packed = emit_rows(
            position, kept, begin, prefix, origin, top, limits, state, base, rule, found, report.words,
            CHOSEN, size, group, lanes,
        )  # fmt: skip
        codes = total_of(packed, group * size)
        if tl.min(position) == SPILLED:
            for tile in tl.range(number * group, number * group + group):
                if tl.sum(tl.where((row == tile) & (position == SPILLED), 1, 0)) != 0:
                    its_count = tl.sum(tl.where(row == tile, n_sent, 0))
                    its_begin = tl.sum(tl.where(row == tile, begin, 0))
                    its_prefix = tl.sum(tl.where(row == tile, prefix, 0))
                    its_origin = origin + (tile - number * group) * size
                    codes += emit_spilled(
                        tile, slot, its_count, its_begin, its_prefix, its_origin, top, limits, state, cut, rule,
                        found, sums, plan, report.words, size,
                    )  # fmt: skip
        if not is_short(slot, sums, plan):
            add_codes(codes, slot, rule, report)


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
        r, v = read(found, source, sent)
        at = tl.max_contiguous((tl.arange(0, group) * size)[:, None] + place, (1, 2))
        write(state, at, r, v, sent, base)

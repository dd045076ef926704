"""Steps 2 to 4 on the CPU, from a gradient to the message that is sent: machine code, shared among threads.

decide.py writes down who passes; here these elements get their classes, those without room are put back, what is left
of the others is settled, and they become words; pack.py makes these compact. Who is not sent stays on the lists with
the code DROPPED: to move all that come after it took as long as to write the message.
"""
# mypy: disable-error-code="index"
# An array that is None is not looked into, which Numba sees and mypy does not.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.cpu import decide, pack
from gradwire.codec.cpu.decide import MAGNITUDE, ONE, ZERO
from gradwire.codec.cpu.head import write_head
from gradwire.codec.form import Shape
from gradwire.codec.interface import GOLDEN, ROUNDING, WINDOW, Inputs, Rule, Selection
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.segments import Segments
from gradwire.compile.threads import shared
from gradwire.layout import Layout

DROPPED = 255  # a candidate that is not sent: below the window, or without room
FULL = 255  # what a counter of eight bits holds
FEW = 1 << 18  # elements whose bookkeeping takes less than it takes to wake a thread, about a millisecond
SHIFT = 272  # elements


@machine_code
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


@machine_code
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


@machine_code
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
    histogram: Array,
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
        histogram[segment, partial:] = 0
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
            else:
                histogram[segment, partial] += 1


@machine_code
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
    variance: Array | None,
    zeta: np.float32,
    tau: np.float32,
    feedback: bool,
    chunk: int,
    words: Array,
) -> None:
    """The words of what is sent, those of a segment from outs[segment] on, and what is left of it.

    Who is not sent gets r and v back, decayed. With tau codes become signs, because the size is always tau.
    """
    kept = np.uint8(8) if tau > ZERO else np.uint8(15)
    for segment in range(first, last):
        begin, end, out = begins[segment], begins[segment] + counts[segment], np.uint64(outs[segment])
        origin = begin % chunk  # a segment lies in one chunk
        for i in range(begin, end):
            if codes[i] != DROPPED:
                words[out] = np.int32(np.uint32(codes[i] & kept) << np.uint32(28) | np.uint32(origin + places[i]))
                out += ONE
            else:
                residual[begin + places[i]] = old_residual[i]
                if variance is not None:
                    variance[begin + places[i]] = old_variance[i] * zeta
        if tau > ZERO or feedback:
            here, exponent = slice(begin, end), exponents[slots[segment]]
            lists = places[here], codes[here], old_residual[here], old_variance[here]
            leave(*lists, residual[begin:], part(variance, begin), exponent, tau)


@machine_code
def part(array: Array | None, begin: int) -> Array | None:
    """From `begin` on, of an array that may be None."""
    return None if array is None else array[begin:]


@machine_code
def leave(
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array,
    residual: Array,
    variance: Array | None,
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
            if variance is not None:
                variance[place] = max(old_variance[i] - abs(r) * np.float32(2) * tau + tau_square, ZERO)
        else:
            bits[0] = (exponent - (code & 7) + 127) << 23
            rest = r + one[0] if code & 8 else r - one[0]
            residual[place] = rest
            if variance is not None:
                variance[place] = rest * rest


@machine_code
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
    variance: Array | None,
) -> None:
    """Every sent element gets r and v back as they were before the send."""
    for segment in range(first, last):
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED:
                place = begins[segment] + places[i]
                residual[place] = old_residual[i]
                if variance is not None:
                    variance[place] = old_variance[i]


@dataclass
class Candidates:
    """The elements that passed, segment by segment from the segment's own begin on, and what they were before.

    The arrays are as long as the bucket, so that no count has to be known; what is never written takes no memory.
    """

    segments: Segments
    places: Array  # from the segment's begin
    residual: Array
    variance: Array  # of the residual, where no variance is kept
    codes: Array  # sign << 3 | size class, or DROPPED
    counts: Array  # by segment, with those that are dropped

    @classmethod
    def take(cls, segments: Segments, numel: int, with_variance: bool) -> Candidates:
        """None yet. Their arrays are used again: the first touch of a page takes as long as ten elements' work."""
        arrays = segments.spare.pop() if segments.spare else tuple(_scratch(numel))
        places, residual, variance, codes = arrays
        counts = np.empty(segments.count, np.int64)
        found = cls(segments, places, residual, variance if with_variance else residual, codes, counts)
        weakref.finalize(found, _give_back, segments.spare, arrays, counts)
        return found

    def each(self, function: Callable[..., None], *args: object) -> None:
        """function(first, last, begins, counts, ...) for the segments of every part; at once where there are few."""
        lists = (self.segments.begins, self.counts, *args)
        if len(self.segments.parts) == 1 or self.counts.sum() < FEW:
            function(0, self.segments.count, *lists)
        else:
            shared(self.segments.parts, function, *lists)


def _scratch(numel: int) -> Iterator[Array]:
    """Places, r, v, codes; each begins at another place of a page, because they are walked together.

    One core of an AMD EPYC, 16 M elements, 1 in 10 sent: 20 ms instead of 25.
    """
    for number, kind in enumerate((np.int32, np.float32, np.float32, np.uint8)):
        shift = number * SHIFT
        yield np.empty(shift + numel, kind)[shift:]


def _give_back(spare: list[tuple[Array, ...]], arrays: tuple[Array, ...], counts: Array) -> None:
    """Keeps what a step with few candidates has touched; a dense step's would be a third of the bucket for good."""
    if counts.sum() <= len(arrays[0]) // 8:
        spare.append(arrays)


def encode(inputs: Inputs, shape: Shape, rule: Rule, step: int) -> tuple[Tensor, Selection]:
    """As `reference.encode`."""
    if shape.blocks is None:
        message = np.empty(shape.words, np.int32)
        message[: shape.body.start], words = 0, message[shape.body]
    else:
        message, words = np.zeros(shape.words, np.int32), None
    chosen = select(inputs, shape.layout, rule, shape.capacity, step, shape.chunk, words)
    counts, orders = chosen.counts.numpy(), None
    if shape.blocks is not None:
        orders = pack.write(chosen.words.numpy(), counts, shape.chunk, shape.blocks, message[shape.body])
        counts = np.zeros_like(counts)  # its blocks count for themselves
    known = (chosen.passed.numpy(), chosen.exponents.numpy(), orders)
    write_head(message, shape, step, bool(chosen.finite), counts, *known)
    return torch.from_numpy(message), chosen


def select(
    inputs: Inputs,
    layout: Layout,
    rule: Rule,
    capacity: Sequence[int],
    step: int,
    chunk: int,
    words: Array | None = None,
) -> Selection:
    """As `reference.select`: one pass over the bucket (with a density, two), and then over those that passed."""
    n_threads, words = torch.get_num_threads(), np.empty(sum(capacity), np.int32) if words is None else words
    segments = layout.kept.get((Segments, n_threads, chunk)) or Segments.of(layout, n_threads, chunk)
    found = Candidates.take(segments, layout.numel, inputs.variance is not None)
    grad, moment, residual, variance = (None if given is None else given.numpy() for given in inputs[:4])
    arrays, lists = (residual, variance, grad, moment), (found.places, found.residual, found.variance)
    decided = decide.accumulate_and_decide(segments, arrays, inputs.active, layout, rule, lists, found.counts)
    exponents, biased, finite = decided
    classes, codes = _classify(found, biased, rule)
    passed = codes.sum(1, dtype=np.int32)
    _cut(found, classes, codes, passed, layout, capacity, step)
    sent = classes.sum(1)
    before = (found.places, found.codes, found.residual, found.variance, residual, variance)
    numbers = (np.float32(rule.zeta), np.float32(rule.tau or 0), rule.feedback, chunk)
    found.each(emit, segments.slots, sent.cumsum() - sent, exponents, *before, *numbers, words)
    words[sent.sum() :] = 0
    if rule.tau is not None:  # d is always 0
        codes = np.pad(codes.sum(1, keepdims=True, dtype=np.int32), ((0, 0), (0, WINDOW)))
    if inputs.active is not None:
        passed = np.where(inputs.active.numpy(), passed, np.int32(-1))
    counts = np.bincount(segments.chunks, sent, minlength=segments.n_chunks).astype(np.int32)
    return Selection(
        torch.from_numpy(words),
        torch.from_numpy(counts),
        torch.from_numpy(codes),
        torch.from_numpy(exponents),
        torch.from_numpy(passed),
        torch.tensor(finite),
        lambda: found.each(put_back, *before),
    )


def _classify(found: Candidates, biased: Array, rule: Rule) -> tuple[Array, Array]:
    """Gives every candidate its code and size class; how many there are of each class, [segments, 8] and [K, 8]."""
    segments = found.segments
    classes, totals = (
        np.empty((segments.count, WINDOW + 1), np.int64),
        np.zeros((segments.n_slots, WINDOW + 1), np.int32),
    )
    tau_binade = -1 if rule.tau is None else int(np.float32(rule.tau).view(np.int32) >> 23)
    numbers = (segments.slots, biased, np.int32(ROUNDING[rule.rounding]), np.int32(tau_binade))
    found.each(classify, *numbers, found.residual, found.codes, classes)
    decide.by_tensor(segments.slots, classes, totals)
    return classes, totals


def _cut(
    found: Candidates, classes: Array, codes: Array, passed: Array, layout: Layout, capacity: Sequence[int], step: int
) -> None:
    """Drops what has no room, and counts it no longer in classes [segments, 8] and codes [K, 8]."""
    cuts, lists = found.segments.of_slots, (found.segments.begins, found.counts, found.places, found.codes, classes)
    for number in np.flatnonzero(passed > np.array(capacity, dtype=np.int64)).tolist():
        slot, room, within = layout.slots[number], capacity[number], codes[number].cumsum()
        partial = int((within <= room).sum())
        room -= int(within[partial - 1]) if partial else 0
        start = slot.offset + step * GOLDEN % slot.numel
        cut(cuts[number], cuts[number + 1], partial, room, start, *lists)
        codes[number] = classes[cuts[number] : cuts[number + 1]].sum(0)

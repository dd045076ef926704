"""Steps 2 to 4 on the CPU, from a gradient to the message that is sent: machine code, shared among threads.

decide.py writes down who passes; here these elements get their classes, those without room are put back, what is left
of the others is settled, and they go into the message: as words, or by pack.py in the compact format. Who is not sent
stays on the lists with the code DROPPED: to move all that come after it took as long as to write the message.
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
from gradwire.codec.interface import GOLDEN, NOTHING, ROUNDING, WINDOW, Encoded, Inputs, Rule, Selection
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.segments import Segments
from gradwire.compile.threads import shared
from gradwire.layout import Layout

DROPPED = 255  # a candidate that is not sent: below the window, or without room
FULL = 255  # what a counter of eight bits holds
FEW = 1 << 18  # elements whose bookkeeping takes less than it takes to wake a thread, about a millisecond
SHIFT = 272  # elements


@machine_code
def exponents_of(tops: Array, slots: Array, top_half: np.int32, hybrid: bool, exponents: Array, biased: Array) -> None:
    """e_k or NOTHING, and biased, [K], from the bits of the largest |r| of every segment."""
    biased[:] = 0
    for segment in range(tops.size):
        biased[slots[segment]] = max(biased[slots[segment]], tops[segment])
    for slot in range(biased.size):
        said = biased[slot] > 0 and not hybrid
        biased[slot] = min((biased[slot] + top_half) >> np.int32(23), np.int32(254))
        exponents[slot] = biased[slot] - np.int32(127) if said else np.int32(NOTHING)


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
def add_up(slots: Array, histogram: Array, totals: Array) -> None:
    """Histograms of segments to those of their tensors, [K, 8]."""
    totals[:] = 0
    for segment in range(slots.size):
        for size_class in range(8):
            totals[slots[segment], size_class] += histogram[segment, size_class]


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


@machine_code
def tally(first: int, last: int, begins: Array, counts: Array, codes: Array, histogram: Array) -> None:
    """How many of each segment's candidates are sent, by size class."""
    for segment in range(first, last):
        count_classes(codes[begins[segment] : begins[segment] + counts[segment]], histogram[segment])


@machine_code
def settle(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    slots: Array,
    sent: Array,
    exponents: Array,
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array | None,
    residual: Array,
    variance: Array | None,
    zeta: np.float32,
    tau: np.float32,
    feedback: bool,
) -> None:
    """Who is not sent gets r and v back, decayed; what is left of the others.

    With tau codes become signs, because the size is always tau.
    """
    for segment in range(first, last):
        begin, end = begins[segment], begins[segment] + counts[segment]
        if sent[segment] < counts[segment]:
            for i in range(begin, end):
                if codes[i] == DROPPED:
                    residual[begin + places[i]] = old_residual[i]
                    if variance is not None:
                        variance[begin + places[i]] = old_variance[i] * zeta
        if tau > ZERO:
            for i in range(begin, end):
                codes[i] = codes[i] if codes[i] == DROPPED else codes[i] & np.uint8(8)
        if tau > ZERO or feedback:
            here, exponent = slice(begin, end), exponents[slots[segment]]
            lists = places[here], codes[here], old_residual[here], decide.part(old_variance, here)
            leave(*lists, residual[begin:], decide.part(variance, slice(begin, None)), exponent, tau)


@machine_code
def leave(
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array | None,
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
def write_words(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    outs: Array,
    places: Array,
    codes: Array,
    chunk: int,
    words: Array,
) -> None:
    """The words of what is sent, those of a segment from outs[segment] on."""
    for segment in range(first, last):
        begin, out = begins[segment], np.uint64(outs[segment])
        origin = begin % chunk  # a segment lies in one chunk
        for i in range(begin, begin + counts[segment]):
            if codes[i] != DROPPED:
                words[out] = np.int32(np.uint32(codes[i]) << np.uint32(28) | np.uint32(origin + places[i]))
                out += ONE


@machine_code
def pick(
    first: int, last: int, begins: Array, counts: Array, places: Array, codes: Array, to_places: Array, to_codes: Array
) -> None:
    """The places and codes of what is sent, those of a segment from its begin on."""
    for segment in range(first, last):
        out = np.uint64(begins[segment])
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED:
                to_places[out], to_codes[out] = places[i], codes[i]
                out += ONE


@machine_code
def put_back(
    first: int,
    last: int,
    begins: Array,
    counts: Array,
    places: Array,
    codes: Array,
    old_residual: Array,
    old_variance: Array | None,
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


@machine_code
def flat_places(begins: Array, counts: Array, places: Array, codes: Array, index: Array) -> None:
    """Where in the bucket the elements are that are sent, [n]."""
    at = 0
    for segment in range(begins.size):
        for i in range(begins[segment], begins[segment] + counts[segment]):
            if codes[i] != DROPPED:
                index[at] = begins[segment] + places[i]
                at += 1


@dataclass
class Candidates:
    """The elements that passed, segment by segment from the segment's own begin on, and what they were before.

    The arrays are as long as the bucket, so that no count has to be known; what is never written takes no memory.
    """

    segments: Segments
    places: Array  # from the segment's begin
    residual: Array
    codes: Array  # sign << 3 | size class, or DROPPED
    variance: Array | None
    counts: Array  # by segment, with those that are dropped
    spare: tuple[Array, Array]  # room for places and codes once more

    @classmethod
    def take(cls, segments: Segments, numel: int, with_variance: bool) -> Candidates:
        """None yet. Their arrays are used again: the first touch of a page takes as long as ten elements' work."""
        arrays = segments.spare.pop() if segments.spare else tuple(_scratch(numel))
        places, residual, variance, codes, *spare = arrays
        counts = np.empty(segments.count, np.int64)
        found = cls(
            segments, places, residual, codes, variance if with_variance else None, counts, (spare[0], spare[1])
        )
        weakref.finalize(found, _give_back, segments.spare, arrays, counts)
        return found

    def each(self, function: Callable[..., None], *args: object, few: bool) -> None:
        """function(first, last, begins, counts, ...) for the segments of every part; at once where there are few."""
        lists = (self.segments.begins, self.counts, *args)
        if few or len(self.segments.parts) == 1:
            function(0, self.segments.count, *lists)
        else:
            shared(self.segments.parts, function, *lists)


def _scratch(numel: int) -> Iterator[Array]:
    """Places, r, v, codes, places, codes; each begins at another place of a page, because they are walked together.

    One core of an AMD EPYC, 16 M elements, 1 in 10 sent: 20 ms instead of 25.
    """
    for number, kind in enumerate((np.int32, np.float32, np.float32, np.uint8, np.int32, np.uint8)):
        shift = number * SHIFT
        yield np.empty(shift + numel, kind)[shift:]


def _give_back(spare: list[tuple[Array, ...]], arrays: tuple[Array, ...], counts: Array) -> None:
    """Keeps what a step with few candidates has touched; a dense step's would be a third of the bucket for good."""
    if counts.sum() <= len(arrays[0]) // 8:
        spare.append(arrays)


@dataclass
class Selected:
    """Who is sent, and what the head says of it."""

    found: Candidates
    sent: Array  # int64, by segment
    finite: bool
    few: bool  # so few that they are not worth threads
    exponents: Array  # int32 [K]
    passed: Array  # int32 [K]
    codes: Array  # int32 [K, 8]
    undo: Callable[[], None]


def encode(inputs: Inputs, shape: Shape, rule: Rule, step: int) -> Encoded:
    """As `reference.encode`: one pass over the bucket (with a density, two), and then over those that passed."""
    chosen = _choose(inputs, shape.layout, rule, shape.capacity, step, shape.chunk)
    found, orders = chosen.found, None
    counts: Array | int = 0  # blocks count for themselves
    if shape.blocks is None:
        message = np.empty(shape.words, np.int32)
        message[: shape.body.start] = message[shape.body.start + chosen.sent.sum() :] = 0
        counts = _words(chosen, shape.chunk, message[shape.body])
    else:
        message = np.zeros(shape.words, np.int32)
        body = message[shape.body]
        begins = found.segments.begins
        orders = pack.write(pack.Lists(begins, begins, chosen.sent, *_picked(chosen)), shape.blocks, body)
    write_head(message, shape, step, chosen.finite, counts, chosen.passed, chosen.exponents, orders)

    def places() -> tuple[Tensor, Tensor]:
        index = np.empty(chosen.sent.sum(), np.int64)
        flat_places(found.segments.begins, found.counts, found.places, found.codes, index)
        return torch.from_numpy(index), torch.ones(len(index), dtype=torch.bool)

    codes, exponents, passed = map(torch.from_numpy, (chosen.codes, chosen.exponents, chosen.passed))
    return Encoded(torch.from_numpy(message), codes, exponents, passed, chosen.undo, places)


def select(inputs: Inputs, layout: Layout, rule: Rule, capacity: Sequence[int], step: int, chunk: int) -> Selection:
    """As `reference.select`."""
    chosen = _choose(inputs, layout, rule, capacity, step, chunk)
    words = np.zeros(sum(capacity), np.int32)
    counts = _words(chosen, chunk, words)
    codes, exponents, passed = map(torch.from_numpy, (chosen.codes, chosen.exponents, chosen.passed))
    numbers = (codes, exponents, passed, torch.tensor(chosen.finite))
    return Selection(torch.from_numpy(words), torch.from_numpy(counts), *numbers, chosen.undo)


def _picked(chosen: Selected) -> tuple[Array, Array]:
    """Places and codes of what is sent, without gaps."""
    found = chosen.found
    if (chosen.sent < found.counts).any():
        found.each(pick, found.places, found.codes, *found.spare, few=chosen.few)
        return found.spare
    return found.places, found.codes


def _words(chosen: Selected, chunk: int, words: Array) -> Array:
    """Writes them; how many each chunk has, int32 [C]."""
    found, segments = chosen.found, chosen.found.segments
    outs = chosen.sent.cumsum() - chosen.sent
    found.each(write_words, outs, found.places, found.codes, chunk, words, few=chosen.few)
    return np.bincount(segments.chunks, chosen.sent, minlength=segments.n_chunks).astype(np.int32)


def _choose(inputs: Inputs, layout: Layout, rule: Rule, capacity: Sequence[int], step: int, chunk: int) -> Selected:
    """Steps 2 to 4 but for the message."""
    grad, moment, residual, variance, active = inputs
    n_threads = torch.get_num_threads()
    segments = layout.kept.get((Segments, n_threads, chunk)) or Segments.of(layout, n_threads, chunk)
    found = Candidates.take(segments, layout.numel, variance is not None)
    r, v, m = residual.numpy(), None if variance is None else variance.numpy(), None
    if v is not None and moment is not None:
        m = moment.numpy()
    lists = (found.places, found.residual, found.variance)
    arrays = (r, v, grad.numpy(), m)
    tops, finite = decide.accumulate_and_decide(segments, arrays, active, layout, rule, lists, found.counts)
    few = int(found.counts.sum()) < FEW
    exponents, classes = _classify(found, tops, rule, few)
    asked = np.empty((segments.n_slots, WINDOW + 1), np.int32)
    add_up(segments.slots, classes, asked)
    codes, passed = asked, asked.sum(1, dtype=np.int32)
    if _cut(found, asked, passed, layout, capacity, step):
        found.each(tally, found.codes, classes, few=few)
        codes = np.empty_like(asked)
        add_up(segments.slots, classes, codes)
    if rule.tau is not None:  # d is always 0
        codes = np.pad(codes.sum(1, keepdims=True, dtype=np.int32), ((0, 0), (0, WINDOW)))
    before = (found.places, found.codes, found.residual, found.variance)
    numbers = (np.float32(rule.zeta), np.float32(rule.tau or 0), rule.feedback)
    sent = classes.sum(1)
    found.each(settle, segments.slots, sent, exponents, *before, r, v, *numbers, few=few)
    if active is not None:
        passed = np.where(active.numpy(), passed, np.int32(-1))

    def undo() -> None:
        found.each(put_back, *before, r, v, few=few)

    return Selected(found, sent, finite, few, exponents, passed, codes, undo)


def _classify(found: Candidates, tops: Array, rule: Rule, few: bool) -> tuple[Array, Array]:
    """Gives every candidate its code and size class; exponents [K], and how many of each class, [segments, 8]."""
    segments, histogram = found.segments, np.empty((found.segments.count, WINDOW + 1), np.int64)
    exponents, biased = np.empty((2, segments.n_slots), np.int32)
    exponents_of(tops, segments.slots, np.int32(decide.top_half(rule)), rule.tau is not None, exponents, biased)
    tau_binade = -1 if rule.tau is None else int(np.float32(rule.tau).view(np.int32) >> 23)
    numbers = (segments.slots, biased, np.int32(ROUNDING[rule.rounding]), np.int32(tau_binade))
    found.each(classify, *numbers, found.residual, found.codes, histogram, few=few)
    return exponents, histogram


def _cut(found: Candidates, asked: Array, passed: Array, layout: Layout, capacity: Sequence[int], step: int) -> bool:
    """Drops what has no room; asked [K, 8]: how many there are of each size class. Whether any was dropped."""
    cuts, begins = found.segments.of_slots, found.segments.begins
    short = np.flatnonzero(passed > np.array(capacity, dtype=np.int64)).tolist()
    for number in short:
        slot, room, within = layout.slots[number], capacity[number], asked[number].cumsum()
        partial = int((within <= room).sum())
        room -= int(within[partial - 1]) if partial else 0
        start = slot.offset + step * GOLDEN % slot.numel
        lists = (begins, found.counts, found.places, found.codes)
        cut(cuts[number], cuts[number + 1], partial, room, start, *lists)
    return bool(short)

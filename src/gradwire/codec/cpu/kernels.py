"""The kernels for the CPU: `compiled` loops, shared among as many threads as torch itself would use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import header
from gradwire.codec.compact import Blocks, check_lengths
from gradwire.codec.cpu import compact as compact_cpu
from gradwire.codec.cpu import decode as compiled_decode
from gradwire.codec.cpu import encode as compiled_encode
from gradwire.codec.cpu import scores as compiled_scores
from gradwire.codec.cpu import stream as compiled_stream
from gradwire.codec.cpu import unpack as compiled_unpack
from gradwire.codec.cpu.segments import Segments, segments_of
from gradwire.codec.header import Parts, Shape
from gradwire.codec.interface import GOLDEN, NOTHING, PROBLEMS, ROUNDING, SMALLEST, WINDOW, Rule, Selection
from gradwire.codec.limits import BINS, limits
from gradwire.compile.threads import equal_parts, shared
from gradwire.layout import Layout

__all__ = ["add", "checksum", "encode", "inspect", "pack", "seal", "unpack"]

Array = np.ndarray[Any, Any]
SHIFT = 272  # elements


@dataclass
class Candidates:
    """The elements that passed, segment by segment from the segment's own begin on, and what they were before.

    The arrays are as long as the bucket, so that no count has to be known; what is never written takes no memory.
    """

    segments: Segments
    places: Array  # from the segment's begin
    residual: Array
    variance: Array
    codes: Array  # sign << 3 | size class, or DROPPED
    counts: Array  # by segment

    @classmethod
    def take(cls, segments: Segments, numel: int) -> Candidates:
        """None yet. Their arrays are used again: the first touch of a page takes as long as ten elements' work."""
        arrays = segments.spare.pop() if segments.spare else tuple(_scratch(numel))
        places, residual, variance, codes = arrays
        found = cls(segments, places, residual, variance, codes, np.empty(len(segments), np.int64))
        weakref.finalize(found, _give_back, segments.spare, arrays, found.counts)
        return found

    @property
    def n_found(self) -> int:
        return int(self.counts.sum())

    def cut(self, asked: Array, layout: Layout, capacity: Sequence[int], step: int) -> bool:
        """Drops what has no room; asked [K, 8]: how many there are of each size class. Whether any was dropped."""
        cuts, begins = self.segments.of_slots, self.segments.begins
        short = np.flatnonzero(asked.sum(1) > np.array(capacity, dtype=np.int64)).tolist()
        for number in short:
            slot, room, within = layout.slots[number], capacity[number], asked[number].cumsum()
            partial = int((within <= room).sum())
            room -= int(within[partial - 1]) if partial else 0
            start = slot.offset + step * GOLDEN % slot.numel
            lists = (begins, self.counts, self.places, self.codes)
            compiled_encode.cut(cuts[number], cuts[number + 1], partial, room, start, *lists)
        return bool(short)

    def tally(self) -> Array:
        """How many are sent, by size class, [segments, 8]."""
        found = np.empty((len(self.segments), WINDOW + 1), np.int64)
        lists = (self.segments.begins, self.counts, self.codes, found)
        self.segments.each(compiled_encode.tally, *lists, n_elements=self.n_found)
        return found

    def put_back(self, residual: Array, variance: Array) -> None:
        """Every sent element gets r and v back as they were before the send."""
        lists = (self.segments.begins, self.counts, self.places, self.codes, self.residual, self.variance)
        self.segments.each(compiled_encode.put_back, *lists, residual, variance, n_elements=self.n_found)


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


def encode(
    grad: Tensor,
    moment: Tensor,
    residual: Tensor,
    variance: Tensor,
    active: Tensor | None,
    layout: Layout,
    rule: Rule,
    capacity: Sequence[int],
    step: int,
    chunk: int,
) -> Selection:
    """As `reference.encode`: one pass over the bucket (with a density, two), and then over those that passed."""
    segments = segments_of(layout, torch.get_num_threads(), chunk)
    found = Candidates.take(segments, layout.numel)
    state = (residual.numpy(), variance.numpy())
    tops, finite = _stream(found, (*state, grad.numpy(), moment.numpy()), active, layout, rule)
    exponents, biased = _exponents(tops, segments, rule)
    sent = _classify(found, biased, rule)
    asked = segments.by_slot(sent)
    if found.cut(asked, layout, capacity, step):
        sent = found.tally()
    words = np.empty(sum(capacity), np.int32)
    words[int(sent.sum()) :] = 0
    _emit(found, sent.sum(1), exponents, state, rule, chunk, words)
    passed = torch.from_numpy(asked.sum(1, dtype=np.int32))
    return Selection(
        torch.from_numpy(words),
        torch.from_numpy(segments.by_chunk(sent.sum(1))),
        torch.from_numpy(_codes(segments.by_slot(sent), rule)),
        torch.from_numpy(exponents),
        passed if active is None else torch.where(active, passed, -1),
        torch.tensor(finite),
        lambda: found.put_back(*state),
    )


def _codes(sent: Array, rule: Rule) -> Array:
    """How many were sent with each d, [K, 8], from how many of each size class; with tau d is always 0."""
    if rule.tau is None:
        return sent
    codes = np.zeros_like(sent)
    codes[:, 0] = sent.sum(1)
    return codes


def _stream(
    found: Candidates, inputs: tuple[Array, ...], active: Tensor | None, layout: Layout, rule: Rule
) -> tuple[Array, bool]:
    """Accumulate and decide: (bits of the largest |r| that passes, by segment; whether all was finite)."""
    segments = found.segments
    live = np.ones(len(segments), np.uint8) if active is None else active.numpy().astype(np.uint8)[segments.slots]
    least = np.float32(SMALLEST)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(np.float32(rule.tau), np.float32(np.inf))
    floor = np.float32(rule.floor)
    test = (np.float32(rule.alpha), np.float32(rule.zeta), least, floor * floor)
    window = (np.int32(-1 if rule.tau is not None else ROUNDING[rule.rounding]), np.int32(_top_half(rule)))
    lists = (found.places, found.residual, found.variance)
    tops, bad = np.empty(len(segments), np.int32), np.empty(len(segments), np.uint8)
    where = (segments.begins, segments.ends, live)
    bounds = _limits(segments, inputs, live, layout, rule)
    segments.each(compiled_stream.stream, *where, inputs, test, bounds, window, lists, found.counts, tops, bad)
    return tops, not bad.any()


def _limits(segments: Segments, inputs: tuple[Array, ...], live: Array, layout: Layout, rule: Rule) -> Array:
    """From which score on an element passes, by segment; empty without a density."""
    if rule.density is None:
        return np.empty(0, np.float32)
    parts, totals = np.empty((len(segments), BINS), np.int32), np.zeros((segments.n_slots, BINS), np.int32)
    numbers = (np.float32(rule.alpha), np.float32(SMALLEST))
    segments.each(compiled_scores.histogram, segments.begins, segments.ends, live, inputs, *numbers, parts)
    compiled_scores.by_tensor(segments.slots, parts, totals)
    return limits(torch.from_numpy(totals), layout, rule).numpy().view(np.float32)[segments.slots]


def _top_half(rule: Rule) -> int:
    """What is added to the bits of the largest |r| before its exponent is taken."""
    return ROUNDING[rule.rounding] if rule.rounding == "unbiased" else 0


def _exponents(tops: Array, segments: Segments, rule: Rule) -> tuple[Array, Array]:
    """e_k or NOTHING, and biased; int32 [K]."""
    largest = segments.largest(tops)
    biased = np.minimum((largest + _top_half(rule)) >> 23, 254).astype(np.int32)
    said = (largest > 0) & (rule.tau is None)
    return np.where(said, biased - 127, NOTHING).astype(np.int32), biased


def _classify(found: Candidates, biased: Array, rule: Rule) -> Array:
    """Gives every candidate its code and size class; how many of each class, [segments, 8]."""
    segments, histogram = found.segments, np.empty((len(found.segments), WINDOW + 1), np.int64)
    tau_binade = -1 if rule.tau is None else int(np.float32(rule.tau).view(np.int32) >> 23)
    numbers = (segments.slots, biased, np.int32(ROUNDING[rule.rounding]), np.int32(tau_binade))
    lists = (found.residual, found.codes, histogram)
    where = (segments.begins, found.counts)
    segments.each(compiled_encode.classify, *where, *numbers, *lists, n_elements=found.n_found)
    return histogram


def _emit(
    found: Candidates,
    sent: Array,
    exponents: Array,
    state: tuple[Array, ...],
    rule: Rule,
    chunk: int,
    words: Array,
) -> None:
    """Writes the words and settles r and v; sent: how many, by segment."""
    segments, starts = found.segments, sent.cumsum() - sent
    lists = (found.places, found.codes, found.residual, found.variance, *state)
    numbers = (np.float32(rule.zeta), np.float32(rule.tau or 0), rule.feedback, chunk)
    where = (segments.begins, found.counts, segments.slots, starts, exponents)
    segments.each(compiled_encode.emit, *where, *lists, *numbers, words, n_elements=found.n_found)


def add(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor
) -> Tensor:
    """As `reference.add`: one thread a rank looks for problems, then every thread has its own part of `out`."""
    found = np.zeros((len(words), len(PROBLEMS)), np.bool_)
    inputs = (words.numpy(), counts.numpy(), _ends(layout), exponents.numpy())
    ranks = np.flatnonzero(sound.numpy())
    numbers: tuple[object, ...] = (rule.tau is not None, chunk, found)
    shared([(int(rank),) for rank in ranks], compiled_decode.check, *inputs, *numbers, n_elements=words.numel())
    if len(ranks) == len(words) and not found.any():
        numbers = (np.float32(rule.tau or 0), np.float32(1 / len(words)), chunk)
        shared(equal_parts(layout.numel, torch.get_num_threads()), compiled_decode.add, *inputs, *numbers, out.numpy())
    return torch.from_numpy(found)


def _ends(layout: Layout) -> Array:
    return np.array([slot.offset + slot.numel for slot in layout], dtype=np.int64)


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`."""
    n_sent = int(counts.sum())
    index, code = np.empty(n_sent, np.int64), np.empty(n_sent, np.int32)
    compiled_decode.split_words(words.numpy(), counts.numpy(), chunk, index, code)
    return compact_cpu.pack(torch.from_numpy(index), torch.from_numpy(code), blocks)


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`, some ranks' messages a thread.

    No torch operation on long tensors: OpenMP's threads would wait for a busy backward.
    """
    check_lengths(orders[0], bodies[0], blocks)
    n_ranks, n_chunks = len(bodies), max(1, -(-blocks.layout.numel // chunk))
    words, counts = np.empty((n_ranks, sum(blocks.capacity)), np.int32), np.zeros((n_ranks, n_chunks), np.int32)
    broken = np.zeros(n_ranks, np.bool_)
    geometry, capacity = blocks.arrays
    sizes = (blocks.entries[-1], blocks.directory_words, blocks.payload_words)
    inputs = (bodies.numpy(), orders.numpy(), sound.numpy(), geometry, capacity, sizes, blocks.hybrid, chunk)
    n_parts = min(n_ranks, torch.get_num_threads())
    ranks = [(n_ranks * part // n_parts, n_ranks * (part + 1) // n_parts) for part in range(n_parts)]
    shared(ranks, compiled_unpack.unpack, *inputs, words, counts, broken, n_elements=words.size)
    return torch.from_numpy(words), torch.from_numpy(counts), torch.from_numpy(broken)


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    totals = [_total(words) for words in messages.numpy().reshape(-1, messages.shape[-1])]
    return torch.from_numpy(np.array(totals, dtype=np.uint64).view(np.int32).reshape(*messages.shape[:-1], 2))


def _total(words: Array) -> int:
    """The checksum of one message, modulo 2^64."""
    pairs = equal_parts(-(-len(words) // 2), torch.get_num_threads())
    return sum(map(int, shared(pairs, compiled_decode.checksum, words))) % (1 << 64)


def seal(shape: Shape, step: int, parts: Parts) -> Tensor:
    """As `reference.seal`."""
    return header.write(shape, step, parts, checksum)


def inspect(messages: Tensor, shape: Shape, step: int) -> Tensor:
    """As `reference.inspect`; but where nothing is wrong, which is nearly always, it is seen at once."""
    header.refuse_length(messages, shape)
    if _sound(messages.numpy(), shape, step):
        return torch.zeros(len(messages), len(header.PROBLEMS), dtype=torch.bool)
    return header.check(messages, shape, step, checksum)


def _sound(messages: Array, shape: Shape, step: int) -> bool:
    """Whether `header.check` would find nothing."""
    known = messages[:, :8] == np.array(shape.fixed(step))
    known[:, 5] = True  # the flags
    counts = messages[:, shape.counts]
    if not known.all() or (counts < 0).any() or (messages[:, shape.passed] < -1).any():
        return False
    if (counts.sum(1, dtype=np.int64) > shape.most).any():
        return False
    return all(_total(words) == int(words[header.CHECKSUM].view(np.uint64)[0]) for words in messages)

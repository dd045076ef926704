"""Steps 2 to 4 and 6 on a GPU against the floor: the bytes that must move, at the copy bandwidth of the same run.

Needs a CUDA device with 20 GB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.interface import CHUNK, Inputs, Rule, Selection
from gradwire.exchange.room import padded
from gradwire.layout import Layout

N_ELEMENTS = 1 << 28
RATIOS = (10, 100, 1000, 10000)
RULE = Rule(alpha=1.0, zeta=0.999, tau=None, floor=0.0, feedback=False, rounding="paper")
ENCODE_BAR, DECODE_BAR = 1.10, 1.30
STATE_BYTES, WORD_BYTES, UNDO_BYTES = 24, 4, 12  # r, v read and written, g, m read; a word; place, r and v for the undo
RANKS, DECODE_RATIO = 8, 100


def time_ms(run: Callable[[], object], prepare: Callable[[], object] = lambda: None, repeats: int = 15) -> float:
    """Median of single runs, between events; what `prepare` does is not timed.

    Fills, of 1 ms together, come before each, so that the host has launched everything by the time the device gets to
    it: that takes Python 0.1 to 0.5 ms, which in training hides behind the backward.
    """
    times, spacer = [], torch.empty(1 << 28, device="cuda")
    for repeat in range(repeats + 3):
        prepare()
        for _ in range(4):
            spacer.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bytes_per_ms() -> float:
    """Read and written, of a copy of 1 GiB. It drifts by 5 % within a minute: taken anew for every case."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / time_ms(lambda: target.copy_(source))


def timed(run: Callable[[], float], n_bytes: int) -> tuple[float, float]:
    """(time, floor) in ms; the floor from the faster of a copy before and a copy after."""
    before = copy_bytes_per_ms()
    time = run()
    return time, n_bytes / max(before, copy_bytes_per_ms())


def layout_of(n_tensors: int, numel: int) -> Layout:
    return Layout.of([(f"tensor{i}", (numel // n_tensors,)) for i in range(n_tensors)])


@dataclass
class Case:
    """A bucket in which one element in `ratio` is sent: gaussian sizes of a spread of half an octave, random places."""

    layout: Layout
    grad: Tensor
    moment: Tensor
    residual: Tensor
    variance: Tensor
    capacity: tuple[int, ...]

    @classmethod
    def make(cls, layout: Layout, ratio: int, encode: Callable[..., Selection], seed: int = 0) -> Case:
        generator = torch.Generator("cuda").manual_seed(seed)
        numel = layout.numel

        def normal() -> Tensor:
            return torch.randn(numel, device="cuda", generator=generator)

        grad = normal().mul_(normal().mul_(0.5).exp_())
        residual = normal().mul_(0.3)
        square = (grad + residual).square_()
        passing = torch.rand(numel, device="cuda", generator=generator) < 1.05 / ratio  # some are below the window
        variance = square * 0.25
        moment = square.mul_(torch.where(passing, 0.25, 2.0))
        case = cls(layout, grad, moment, residual, variance, tuple(slot.numel // 2 for slot in layout))
        passed = case.encode(encode, *(tensor.clone() for tensor in (residual, variance))).passed.tolist()
        case.capacity = tuple(padded(count) for count in passed)
        return case

    def encode(self, encode: Callable[..., Selection], residual: Tensor, variance: Tensor, **options: Any) -> Selection:
        inputs = Inputs(self.grad, self.moment, residual, variance)
        return encode(inputs, self.layout, RULE, self.capacity, 1, CHUNK, **options)


def encode_ms(case: Case, run: Callable[[Tensor, Tensor], object]) -> float:
    residual, variance = case.residual.clone(), case.variance.clone()

    def restore() -> None:
        residual.copy_(case.residual)
        variance.copy_(case.variance)

    return time_ms(lambda: run(residual, variance), restore)


def encode_measurements() -> Iterator[Measurement]:
    from gradwire.codec.form import Blocks
    from gradwire.codec.gpu import codec as gpu

    for n_tensors in (1, 64):
        layout = layout_of(n_tensors, N_ELEMENTS)
        for ratio in RATIOS:
            case = Case.make(layout, ratio, gpu.select)
            blocks = Blocks.of(layout, case.capacity)

            def words(residual: Tensor, variance: Tensor, case: Case = case) -> Selection:
                return case.encode(gpu.select, residual, variance)

            def compact(residual: Tensor, variance: Tensor, case: Case = case, blocks: Blocks = blocks) -> object:
                chosen = case.encode(gpu.select, residual, variance)
                return gpu.pack(chosen.words, chosen.counts, chosen.codes, blocks, CHUNK)

            n_sent = int(words(case.residual.clone(), case.variance.clone()).counts.sum())
            for wire, run in (("words", words), ("compact", compact)):
                n_bytes = STATE_BYTES * N_ELEMENTS + (WORD_BYTES + UNDO_BYTES) * n_sent
                what = f"encode {n_tensors} tensor{'s' * (n_tensors > 1)}"
                times = timed(lambda case=case, run=run: encode_ms(case, run), n_bytes)
                yield Measurement(what, ratio, wire, *times, ENCODE_BAR)
            del case


def decode_measurements() -> Iterator[Measurement]:
    from gradwire.codec.form import Blocks
    from gradwire.codec.gpu import codec as gpu

    layout = layout_of(64, N_ELEMENTS)
    capacity = Case.make(layout, DECODE_RATIO, gpu.select).capacity
    chosen = []
    for rank in range(RANKS):
        case = Case.make(layout, DECODE_RATIO, gpu.select, rank)
        case.capacity = capacity
        chosen.append(case.encode(gpu.select, case.residual, case.variance))
        del case
    blocks = Blocks.of(layout, capacity)
    packed = [gpu.pack(one.words, one.counts, one.codes, blocks, CHUNK) for one in chosen]
    words, counts, exponents = (
        torch.stack([getattr(one, name) for one in chosen]) for name in ("words", "counts", "exponents")
    )
    orders, bodies = (torch.stack(parts) for parts in zip(*packed, strict=True))
    sound, out = torch.ones(RANKS, dtype=torch.bool, device="cuda"), torch.empty(N_ELEMENTS, device="cuda")

    def add(words: Tensor, counts: Tensor) -> Tensor:
        return gpu.add(words, counts, sound, exponents, layout, RULE, CHUNK, out)

    def unpack() -> tuple[Tensor, Tensor]:
        return gpu.unpack(orders, bodies, sound, blocks, CHUNK)[:2]

    n_words = int(counts.sum()) * WORD_BYTES
    floors = {"words": 4 * N_ELEMENTS + n_words, "compact": 4 * N_ELEMENTS + 4 * bodies.numel()}
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("check + add 8 messages", "words"): lambda: add(words, counts),
        ("unpack + check + add 8 messages", "compact"): lambda: add(*unpack()),
    }
    for (what, wire), run in runs.items():
        times = timed(lambda run=run: time_ms(run), floors[wire])
        yield Measurement(what, DECODE_RATIO, wire, *times, DECODE_BAR)
    times = timed(lambda: time_ms(lambda: gpu.checksum(words)), 4 * words.numel())
    yield Measurement("checksum 8 messages", DECODE_RATIO, "words", *times, DECODE_BAR)


@dataclass
class Measurement:
    """One line of the table; floor_ms: the bytes that must move, at copy bandwidth."""

    what: str
    compression: int
    wire: str
    time_ms: float
    floor_ms: float
    bar: float

    @property
    def times_floor(self) -> float:
        return self.time_ms / self.floor_ms

    def row(self) -> dict[str, object]:
        return {
            "what": f"{self.what}, 1 in {self.compression} sent, {self.wire}",
            "against": "bytes that must move, at copy bandwidth",
            "time_ms": round(self.time_ms, 4),
            "reference_ms": round(self.floor_ms, 4),
            "ratio": round(self.times_floor, 3),
            "bar": self.bar,
            "holds": self.times_floor <= self.bar,
        }


def measurements() -> Iterator[Measurement]:
    yield from encode_measurements()
    yield from decode_measurements()


def rows() -> Iterator[dict[str, object]]:
    """One row a measurement; `ratio` is time over floor."""
    for measurement in measurements():
        yield measurement.row()

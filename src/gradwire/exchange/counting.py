"""What was sent, byte-true: counted where the bytes are handed to the collective."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.layout import Layout

PHASES = ("encode", "exchange", "decode")


@dataclass(frozen=True)
class Stats:
    """What one worker sent since it was attached (or since the totals were reset)."""

    steps: int
    dense_steps: int  # steps in which everything was sent
    bytes_sent: int  # handed to the collectives by this worker, headers and padding included
    bytes_received: int  # from the other workers: (W - 1) messages, or the reduced tensor
    dense_bytes: int  # handed to the collectives by plain DDP
    ratio: float  # the paper's: parameters / mean number of elements sent by one worker in one step
    bits_per_parameter: float  # bits sent a parameter and step
    elements_sent: dict[str, int]  # by parameter
    deferred: int  # elements that passed and did not fit into a message: they stay in the residual
    encode_ms: float  # means a step
    exchange_ms: float
    decode_ms: float
    delay: float  # |r|_1 / |sent in the last step|_1, in steps
    residual_norm: float  # |r|_2

    def __str__(self) -> str:
        if not self.steps:
            return "nothing sent yet"
        fewer = self.dense_bytes / self.bytes_sent if self.bytes_sent else float("inf")
        return (
            f"{self.steps} steps: {self.bytes_sent / 1e6:.3f} MB sent ({fewer:.1f}x less than dense, "
            f"{self.bits_per_parameter:.3f} bits/parameter), ratio {self.ratio:.1f}, "
            f"encode {self.encode_ms:.2f} ms, exchange {self.exchange_ms:.2f} ms, decode {self.decode_ms:.2f} ms, "
            f"delay {self.delay:.1f} steps, residual norm {self.residual_norm:.3g}"
        )


class Counts(NamedTuple):
    """Of one bucket in one step."""

    sent: Tensor | None = None  # integers [K], elements sent of each tensor; None: all
    passed: Tensor | None = None  # integers [K], elements that asked for room; None: as many
    norm: Tensor | None = None  # float32 [], |sent|_1


class Mark(NamedTuple):
    """A moment; event: on a GPU's stream."""

    time: float
    event: torch.cuda.Event | None = None


Lap = tuple[str, Mark, Mark]  # phase, begin, end


class Writer(Protocol):
    """Anything with TensorBoard's add_scalar."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def scalars(stats: Stats) -> dict[str, float]:
    """The figures of `stats` that are one number."""
    return {f.name: float(getattr(stats, f.name)) for f in fields(stats) if f.name != "elements_sent"}


class Meter:
    """Counts as the steps go by; the courier's thread and the backward's both write here."""

    def __init__(self, n_parameters: int) -> None:
        self.n_parameters = n_parameters
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.steps = self.dense_steps = self.bytes_sent = self.bytes_received = self.dense_bytes = 0
        self._elements: Counter[str] = Counter()
        self._milliseconds = dict.fromkeys(PHASES, 0.0)
        self._deferred = 0
        self._pending: list[tuple[Layout, Tensor, Tensor]] = []  # counts on the device: read when asked for
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._norms: list[Tensor] = []
        self._last_norms: list[Tensor] = []

    def count(self, n_sent: int, n_received: int, n_dense: int) -> None:
        """Bytes of one bucket."""
        with self._lock:
            self.bytes_sent += n_sent
            self.bytes_received += n_received
            self.dense_bytes += n_dense

    def bucket(self, layout: Layout, n_bytes: tuple[int, int, int], counts: Counts, laps: Sequence[Lap]) -> None:
        """All of one bucket; bytes as `count` has them."""
        self.count(*n_bytes)
        self.elements(layout, counts)
        self.laps(laps)

    def elements(self, layout: Layout, counts: Counts) -> None:
        """Elements of one bucket."""
        with self._lock:
            if counts.norm is not None:
                self._norms.append(counts.norm)
            if counts.sent is None:
                self._elements.update({slot.name: slot.numel for slot in layout.slots})
                return
            self._pending.append((layout, counts.sent, counts.sent if counts.passed is None else counts.passed))
            if len(self._pending) > 256:
                self._fold()

    def end_step(self, dense: bool) -> None:
        with self._lock:
            self.steps += 1
            self.dense_steps += dense
            self._last_norms, self._norms = self._norms, []

    def _fold(self) -> None:
        for layout, sent, passed in self._pending:
            self._elements.update(dict(zip(layout.names, sent.tolist(), strict=True)))
            self._deferred += int((passed.clamp(min=0) - sent).sum())
        self._pending.clear()
        for phase, begin, end in self._events:
            end.synchronize()
            self._milliseconds[phase] += begin.elapsed_time(end)
        self._events.clear()

    def laps(self, laps: Sequence[Lap]) -> None:
        """How long the phases of a bucket took: on the host for the CPU, on the stream for a GPU."""
        with self._lock:
            for phase, begin, end in laps:
                if begin.event is not None and end.event is not None:
                    self._events.append((phase, begin.event, end.event))
                else:
                    self._milliseconds[phase] += (end.time - begin.time) * 1e3

    def stats(self, residuals: list[Tensor]) -> Stats:
        """The totals, and the norms of what is held back now."""
        with self._lock:
            self._fold()
            steps = max(1, self.steps)
            sent = self._elements.total()
            held = float(sum(r.abs().sum(dtype=torch.float64) for r in residuals))
            squared = float(sum(r.double().square().sum() for r in residuals))
            last = float(sum(norm.double() for norm in self._last_norms))
            return Stats(
                steps=self.steps,
                dense_steps=self.dense_steps,
                bytes_sent=self.bytes_sent,
                bytes_received=self.bytes_received,
                dense_bytes=self.dense_bytes,
                ratio=self.n_parameters * self.steps / sent if sent else float("inf") if self.steps else 0.0,
                bits_per_parameter=8 * self.bytes_sent / (steps * self.n_parameters),
                elements_sent=dict(self._elements),
                deferred=self._deferred,
                **{f"{phase}_ms": self._milliseconds[phase] / steps for phase in PHASES},
                delay=held / last if last else float("inf") if held else 0.0,
                residual_norm=squared**0.5,
            )

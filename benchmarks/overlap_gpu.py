"""How much of encode and exchange lies inside the backward: one step of DDP with VGC, by host clock and GPU trace.

Two processes with a GPU between them, or with CPU tensors. What the host does is timed by marks that are set from here
(the library has none), what the GPU does by torch.profiler, which watches CUDA only: recording every operation of the
host would slow down what is measured. The spans go to results/overlap.csv, from which `python -m benchmarks docs` draws
docs/figures/overlap.svg.
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from benchmarks.models import GPT
from benchmarks.ranks import on_ranks
from gradwire.exchange.counting import Lap

Row = dict[str, Any]
SPANS = Path(__file__).parent / "results" / "overlap.csv"
ON_DEVICE, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
SETTLE = 25  # steps until messages have got their size
LOOKS = 5  # steps that are looked at
JOIN_NS = 100_000  # kernels of the backward nearer than this are one span
COURIER = ("encode", "exchange", "decode")


@dataclass(frozen=True)
class Span:
    """A piece of work; lane: forward, backward, encode, ...; name: which bucket, or the lane."""

    lane: str
    name: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Model:
    """GPT-2's shape at some size, the batch of a rank, and DDP's buckets."""

    name: str
    sizes: dict[str, int]
    samples: int
    positions: int
    bucket_mib: float = 25


SMALL = Model("GPT 50M", {"vocabulary": 8192, "positions": 1024, "width": 768, "depth": 6}, 16, 1024)


class Mark(NamedTuple):
    """What the host did, in nanoseconds of the system's clock."""

    begin: int
    end: int
    lane: str


class Kernel(NamedTuple):
    """What the GPU did and when the host asked for it; main: on the stream of the forward."""

    launched: int
    begin: int
    end: int
    main: bool


class Marks(list[Mark]):
    """Takes the times; the courier's thread and the backward's both write here."""

    @contextmanager
    def __call__(self, lane: str) -> Iterator[None]:
        begin = time.time_ns()
        yield
        self.append(Mark(begin, time.time_ns(), lane))

    def watch(self, wire: gradwire.Wire) -> None:
        """The phases of every bucket, and the moment in which the backward hands it over."""
        meter, pipeline = wire._reducer.meter, wire._reducer._pipeline
        laps, submit, since = meter.laps, pipeline.submit, time.time_ns() - time.perf_counter_ns()

        def both(taken: Sequence[Lap]) -> None:
            laps(taken)
            for lane, begin, end in taken:
                self.append(Mark(*(since + round(1e9 * mark.time) for mark in (begin, end)), lane))

        def ready(*args: Any) -> None:
            with self("ready"):
                submit(*args)

        meter.laps, pipeline.submit = both, ready


def trace(device: str, model: Model, settle: int) -> list[Span]:
    """On every rank: the spans of the median of some steps, by how much of encode and exchange the backward covers."""
    torch.manual_seed(0)
    network = DistributedDataParallel(GPT(**model.sizes).to(device), bucket_cap_mb=model.bucket_mib)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    wire, mark = gradwire.attach(network, gradwire.VGC(alpha=1.5), strict=True), Marks()
    mark.watch(wire)

    def step() -> None:
        ids = torch.randint(0, model.sizes["vocabulary"], (model.samples, model.positions + 1), device=device)
        optimizer.zero_grad()
        with mark("forward"), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            output = network(ids[:, :-1])
            loss = F.cross_entropy(output.flatten(0, 1).float(), ids[:, 1:].flatten())
        with mark("backward"):
            loss.backward()
        with mark("optimizer"):
            optimizer.step()

    for _ in range(settle):
        step()
    looks = [look(step, mark, profiled if device == "cuda" else unprofiled) for _ in range(LOOKS + 1)]
    return sorted(looks[1:], key=share)[LOOKS // 2]  # without the first: the profiler's own start-up


def look(step: Callable[[], None], mark: Marks, observed: Callable[[Callable[[], None]], list[Kernel]]) -> list[Span]:
    """The spans of one step that all ranks begin together."""
    dist.barrier()
    mark.clear()
    kernels = observed(step)
    return spans_of(sorted(mark), kernels)


def unprofiled(step: Callable[[], None]) -> list[Kernel]:
    step()
    return []


def profiled(step: Callable[[], None]) -> list[Kernel]:
    """What the GPU did in one step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8")))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """From Chrome's trace format: microseconds from a base in nanoseconds."""
    base = trace["baseTimeNanoseconds"]
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = {event["args"].get("correlation"): event["ts"] for event in events if event.get("cat") in CALLS}
    ran = [e for e in events if e.get("cat") in ON_DEVICE and e["args"].get("correlation") in calls]
    main = min(ran, key=lambda event: event["ts"])["args"]["stream"]
    return [
        Kernel(
            *(base + round(1e3 * us) for us in (calls[e["args"]["correlation"]], e["ts"], e["ts"] + e["dur"])),
            e["args"]["stream"] == main,
        )
        for e in ran
    ]


def spans_of(marks: list[Mark], kernels: list[Kernel]) -> list[Span]:
    """The lanes, from the first mark on. On a GPU work is where its kernels ran, but for the exchange."""
    start, last_ready = marks[0].begin, max(mark.end for mark in marks if mark.lane == "ready")
    found: list[Span] = []
    encoded, buckets = start, dict.fromkeys(COURIER, 0)
    for begin, end, lane in marks:
        if lane == "ready":
            continue
        until = min(end, last_ready) if lane == "backward" else end  # what follows is waiting for the exchange
        if lane == "exchange":
            pieces = [(max(begin, encoded), end)]  # its host waits for the encode first
        elif kernels:
            own = [(k.begin, k.end) for k in kernels if begin <= k.launched <= until and k.main != (lane in COURIER)]
            pieces = joined(own, math.inf if lane in COURIER else JOIN_NS)
        else:
            pieces = [(begin, until)]
        if lane == "encode":
            encoded = pieces[-1][1]
        name = lane
        if lane in buckets:
            buckets[lane] += 1
            name = f"bucket {buckets[lane]}"
        found += [Span(lane, name, (b - start) / 1e6, (e - start) / 1e6) for b, e in pieces]
    return found


def joined(pieces: list[tuple[int, int]], gap_ns: float) -> list[tuple[int, int]]:
    """The pieces in order, those that lie nearer than the gap made one."""
    made: list[tuple[int, int]] = []
    for begin, end in sorted(pieces):
        if made and begin - made[-1][1] <= gap_ns:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((begin, end))
    return made


def inside(spans: list[Span]) -> tuple[float, float]:
    """Milliseconds of encode and exchange: within the backward, and in all."""
    backward = [span for span in spans if span.lane == "backward"]
    begin_ms, end_ms = min(span.begin_ms for span in backward), max(span.end_ms for span in backward)
    work = [span for span in spans if span.lane in ("encode", "exchange")]
    within = sum(max(0.0, min(span.end_ms, end_ms) - max(span.begin_ms, begin_ms)) for span in work)
    return within, sum(span.end_ms - span.begin_ms for span in work)


def share(spans: list[Span]) -> float:
    within, total = inside(spans)
    return within / total


def save(spans: list[Span], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Span))
        writer.writerows((span.lane, span.name, f"{span.begin_ms:.3f}", f"{span.end_ms:.3f}") for span in spans)


def row_of(model: Model, where: str, spans: list[Span]) -> Row:
    within, total = inside(spans)
    what = f"encode + exchange inside the backward, {model.name}, B {model.samples} T {model.positions}, {where}"
    return {"what": what, "against": "all of encode + exchange", "time_ms": within, "reference_ms": total}


def rows(model: Model = SMALL, settle: int = SETTLE) -> Iterator[Row]:
    """Of rank 0; the same spans are drawn."""
    spans = on_ranks(2, trace, "cuda", model, settle)[0]
    save(spans, SPANS)
    yield row_of(model, "2 processes on one GPU, Gloo", spans)

"""Real bytes of given sizes over shaped links, by the collectives of a training: the time of a step without its model.

A ring of W workers puts (W - 1) m bytes on every link in an all-gather of messages of m bytes, and 2 b (W - 1) / W in
an all-reduce of b bytes. H < W hosts send larger messages, so that every link carries what W would put on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.tools.input_errors import InputError, at_least
from gradwire.tools.race import events
from gradwire.tools.race.trace import ByteTrace, Sample

HOST = "gradwire.tools.race.player"
MIB = 1 << 20
FIRST_BUCKET = MIB  # DistributedDataParallel's first is small, so that something is sent early
COLLECTIVES = ("gather", "sum")
BESIDE = {"dense": ("float32", 1.0), "bf16": ("bfloat16", 0.5)}  # sums beside the trace: their part of the dense bytes

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step to be replayed: buckets of bytes that a host hands to the collective, each a part of the model."""

    what: str
    collective: str
    dtype: str  # of a sum
    place: int
    n_bytes: float  # of the trace
    link_bytes: float  # what a link carries
    buckets: list[int]
    parts: list[float]
    steps: int = 1  # of a round, whose bytes these are


@dataclass(frozen=True)
class Setting:
    """What all steps of a replay have in common."""

    workers: int
    hosts: int
    compute_ms: float = 0.0
    overlap: bool = False
    steps: int = 5
    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        at_least({"--hosts": (self.hosts, 2), "--workers": (self.workers, 2), "--steps": (self.steps, 1)})
        if self.hosts > self.workers:
            raise InputError(f"--hosts {self.hosts} for {self.workers} workers: no more hosts than workers")
        if not 0 <= self.compute_ms < float("inf"):
            raise InputError(f"--compute-ms must be 0 or more, not {self.compute_ms}")
        if not 0.1 <= self.bucket_mib < float("inf"):
            raise InputError(f"--bucket-mib must be 0.1 or more, not {self.bucket_mib}")


def link_bytes(n_bytes: float, collective: str, workers: int) -> float:
    """What a ring of workers puts on each link."""
    return n_bytes * (workers - 1) if collective == "gather" else 2 * n_bytes * (workers - 1) / workers


def on_host(n_bytes: float, collective: str, workers: int, hosts: int) -> float:
    """What a host hands to the collective, so that a link carries as much as among all workers."""
    return n_bytes * link_bytes(1, collective, workers) / link_bytes(1, collective, hosts)


def parts_of(dense_bytes: float, bucket_mib: float) -> list[float]:
    """DDP's buckets as parts of the model, in the order they are ready. Tensors are not cut there, but here."""
    left = dense_bytes
    sizes: list[float] = []
    while left > 0:
        cap = FIRST_BUCKET if not sizes else bucket_mib * MIB
        sizes.append(min(left, cap))
        left -= sizes[-1]
    return [size / dense_bytes for size in sizes]


def cases(trace: ByteTrace, setting: Setting, collective: str, beside: Sequence[str]) -> list[Case]:
    """The samples of the trace, and one of each sum beside it."""
    dense = trace.samples[0].dense_bytes
    found = [_case("trace", collective, "float32", sample, setting) for sample in trace.samples]
    for name in beside:
        dtype, part = BESIDE[name]
        found.append(_case(name, "sum", dtype, Sample(0, part * dense, dense), setting))
    return found


def _case(what: str, collective: str, dtype: str, sample: Sample, setting: Setting) -> Case:
    # a round of local steps sends all it has in one message
    parts = parts_of(sample.dense_bytes, setting.bucket_mib) if sample.steps == 1 else [1.0]
    mine = on_host(sample.n_bytes, collective, setting.workers, setting.hosts)
    buckets = [max(4, round(mine * part)) for part in parts]
    on_link = link_bytes(sample.n_bytes, collective, setting.workers)
    return Case(what, collective, dtype, sample.place, sample.n_bytes, on_link, buckets, parts, sample.steps)


def replay(
    every: Sequence[Case], setting: Setting, rate: str, tell: Callable[[Row], None], loopback: bool = False
) -> list[Row]:
    """All steps over one link, in one lab; `tell` gets the row of each case as it is done."""
    rows: list[Row] = []

    def told(event: events.Event) -> None:
        case = every[event["case"]]
        common = {"workers": setting.workers, "hosts": setting.hosts, "compute_ms": setting.compute_ms}
        n_bytes, on_link = case.n_bytes / case.steps, case.link_bytes / case.steps
        figures = {"place": case.place, "steps": case.steps, "bytes_a_step": n_bytes, "link_bytes": on_link}
        names = {"rate": rate, "what": case.what, "collective": case.collective}
        rows.append({**names, **common, "overlap": setting.overlap, **figures, "ms_a_step": event["ms_a_step"]})
        tell(rows[-1])

    settings = {"setting": asdict(setting), "cases": [asdict(case) for case in every]}
    with events.open_hosts(setting.hosts, rate, loopback) as hosts:
        events.watch(hosts, HOST, settings, told)
    return rows

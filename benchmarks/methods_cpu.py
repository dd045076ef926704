"""A whole exchange of every method beside its public twin: 2 processes over Gloo on loopback, one thread each.

A step is a backward that costs nothing but a copy (given.py), encode, exchange, decode, the mean in `.grad`. Ours go
through DistributedDataParallel, bucket by bucket, as do torch's hooks; the other projects take the gradients after the
backward, as their examples do. Only for a method that needs second moments the model computes and learns in its steps.
In a row the two take turns, step by step, on the same gradients; the median of the slower rank counts. Bytes are those
that a rank hands to collectives, counted where torch.distributed is called.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from benchmarks import twins
from benchmarks.given import LEARNING_RATE, N_PARAMETERS, Computed, Given, Sample, Scene, scene
from benchmarks.ranks import on_ranks
from benchmarks.twins import Tally, Twin
from gradwire.methods import METHODS, from_spec
from gradwire.tools.train import method_bits

Row = dict[str, Any]
WORLD = 2
WARM, ROUNDS = 6, 50  # a method that needs room settles in the first
BAR = 1.0
DENSE, DENSE_BITS = "dense", 32.0


def grace(what: str, *args: Any) -> Twin:
    return Twin(f"GRACE {what}", twins.grace, args, project="grace")


def torch_powersgd(rank: int) -> Twin:
    return Twin(f"torch powerSGD_hook rank {rank}", twins.torch_powersgd, (rank,), hook=True, one_bucket=True)


def epfml(rank: int) -> Twin:
    return Twin(f"epfml PowerSGD rank {rank}", twins.epfml_powersgd, (rank,), project="powersgd")


def demo(k: int) -> Twin:
    return Twin(f"DeMo k={k}", twins.demo, (k, 64), project="DeMo", optimizes=True)


def quantized(levels: int, group: int) -> Twin:
    options = {"quantum_num": levels, "bucket_size": group}
    return grace(f"QSGD, {levels} levels in {group}", "qsgd", "none", "allgather", options)


TOPK = grace("top-k 1 %", "topk", "residual", "allgather", {"compress_ratio": 0.01})
# By method: our options beside theirs. Every method is measured against Dense too, with its defaults.
PAIRS: dict[str, tuple[tuple[str, Twin], ...]] = {
    "fp16": (("fp16", Twin("torch fp16_compress_hook", twins.torch_fp16, hook=True)),),
    "momentum_dct": (
        ("momentum_dct:chunk=64,k=32,sign=true", demo(32)),
        ("momentum_dct:chunk=64,k=4,sign=true", demo(4)),
    ),
    "powersgd": (
        ("powersgd:rank=1", torch_powersgd(1)),
        ("powersgd:rank=4", torch_powersgd(4)),
        ("powersgd:rank=1", epfml(1)),
        ("powersgd:rank=4", epfml(4)),
        ("powersgd:rank=1", Twin("GRACE PowerSGD rank 1", twins.grace_powersgd, (1,), project="grace")),
    ),
    "qsgd": (
        ("qsgd:bits=4,group=512", quantized(7, 512)),
        ("qsgd:bits=2,group=128", quantized(1, 128)),
        ("qsgd:bits=8,group=128", quantized(127, 128)),
    ),
    "randomk": (
        ("randomk:density=0.01", grace("random-k 1 %", "randomk", "residual", "allreduce", {"compress_ratio": 0.01})),
    ),
    "signsgd": (
        ("signsgd:feedback=false,vote=true", grace("sign, majority vote", "signsgd", "none", "allgather", {})),
        ("signsgd", grace("EF-signSGD", "efsignsgd", "efsignsgd", "allgather", {"lr": 0.1})),
    ),
    "terngrad": (("terngrad", grace("TernGrad", "terngrad", "none", "allgather", {})),),
    "topk": (("topk:density=0.01", TOPK), ("topk:density=0.01,exact=true", TOPK)),
}


@dataclass
class Contender:
    """One method with a model of its own; bytes and times of its steps."""

    module: Given | Computed
    step: Callable[..., None]
    times_ms: list[float] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)

    def run(self, sample: Sample) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        arguments = self.module.arguments(sample)
        dist.barrier()
        with Tally() as tally:
            begin = time.perf_counter()
            self.step(*arguments)
            self.times_ms.append((time.perf_counter() - begin) * 1e3)
        self.n_bytes.append(tally.n_bytes)


def ours(spec: str, module: Given | Computed, one_bucket: bool = False, optimizes: bool = False) -> Contender:
    """One bucket, or those that DDP makes by itself; with an optimizer's step where the twin has one."""
    model = DistributedDataParallel(module, **_buckets(one_bucket))
    wire = gradwire.attach(model, from_spec(spec))
    after = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE).step if optimizes else wire.skip_step

    def step(*arguments: Any) -> None:
        model(*arguments).backward()
        after()

    return Contender(module, step)


def theirs(twin: Twin, module: Given) -> Contender:
    if twin.hook:
        model = DistributedDataParallel(module, **_buckets(twin.one_bucket))
        twin.make(model, *twin.args)
        return Contender(module, lambda *arguments: model(*arguments).backward())
    after = twin.make(module, *twin.args)

    def step(*arguments: Any) -> None:
        module(*arguments).backward()
        after()

    return Contender(module, step)


def _buckets(one: bool) -> dict[str, Any]:
    return {"bucket_cap_mb": twins.ONE_BUCKET_MB} if one else {}


@dataclass(frozen=True)
class Figures:
    """Of one contender on one rank."""

    time_ms: float
    n_bytes: float


Pair = tuple[str, Twin | None]  # None: our own Dense


def measure(pairs: Sequence[Pair]) -> list[tuple[Figures, Figures]]:
    """On every rank: ours and the other in turn, pair after pair."""
    given = scene(dist.get_rank())
    return [measure_pair(spec, twin, given) for spec, twin in pairs]


def measure_pair(spec: str, twin: Twin | None, given: Scene) -> tuple[Figures, Figures]:
    torch.manual_seed(0)  # GRACE draws from the global generator, and all ranks must draw alike
    if twin is None:
        computes = from_spec(spec).needs_moments  # and its training goes on: at fixed weights nothing would cancel
        kind = Computed if computes else Given
        both = [ours(one, kind(given), optimizes=computes) for one in (spec, DENSE)]
    else:
        both = [ours(spec, Given(given), twin.one_bucket, twin.optimizes), theirs(twin, Given(given))]
    for turn in range(WARM + ROUNDS):
        for contender in both if turn % 2 else reversed(both):  # who comes second finds the gradients in a cache
            contender.run(given.samples[turn % len(given.samples)])
    mine, other = (figures(contender) for contender in both)
    return mine, other


def figures(contender: Contender) -> Figures:
    return Figures(statistics.median(contender.times_ms[WARM:]), statistics.mean(contender.n_bytes[WARM:]))


def rows() -> Iterator[Row]:
    """Method by method: bits of a real training, then against twins, then against Dense."""
    trace = method_bits.record()
    for name, known in METHODS.items():
        spec = known.example or name
        bits = {"value": method_bits.measure(from_spec(spec), trace).bits, "reference": DENSE_BITS, "unit": "bits"}
        yield {"what": f"{spec}, bits a parameter of digits", "against": DENSE} | bits
        pairs: list[Pair] = [*PAIRS.get(name, ()), *([] if name == DENSE else [(spec, None)])]
        there = [(spec, twin) for spec, twin in pairs if twin is None or not twin.missing]
        for spec, twin in pairs:
            if twin is not None and twin.missing:
                yield {"what": f"{spec}, step", "against": twin.missing}
        answers = on_ranks(WORLD, measure, there) if there else []
        for (spec, twin), *ranks in zip(there, *answers, strict=True):
            yield from rows_of(spec, twin, ranks)


def rows_of(spec: str, twin: Twin | None, ranks: Sequence[tuple[Figures, Figures]]) -> Iterator[Row]:
    """Time and bytes; against Dense there is no bar."""
    against, bar = (DENSE, None) if twin is None else (twin.name, BAR)
    mine, other = (max(rank[side].time_ms for rank in ranks) for side in (0, 1))
    times = {"what": f"{spec}, step", "against": against, "time_ms": mine, "reference_ms": other}
    yield times | judged(mine / other, bar)
    mine, other = (ranks[0][side].n_bytes for side in (0, 1))
    bits = {"value": 8 * mine / N_PARAMETERS, "reference": 8 * other / N_PARAMETERS, "unit": "bits"}
    yield {"what": f"{spec}, bits a parameter", "against": against} | bits | judged(mine / other, bar)


def judged(ratio: float, bar: float | None) -> Row:
    return {} if bar is None else {"bar": bar, "holds": ratio <= bar}

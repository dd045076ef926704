"""The replay over shaped links, beside real runs and with a GPU's compute times: hosts in network namespaces."""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.race_links import HOSTS, UNLIMITED, Quiet
from gradwire.tools.lab import missing
from gradwire.tools.race import contest, race_runner
from gradwire.tools.race.race_files import RaceFiles
from gradwire.tools.race.replay import Setting, cases, replay
from gradwire.tools.race.trace import ByteTrace, Sample, load, thin

Row = dict[str, Any]
CHECKED = {"vgc:alpha=1.5": "10", "bf16": "20"}  # method and rate: the link is the larger part of a step
SETTLE, COUNTED, PLAYED = 20, 100, 30  # steps of a run that a replay is compared with, and of the replay
WITHIN = 1.1

EXPERIMENT = Path(__file__).parent.parent / "experiments" / "results" / "paper-100" / "sgd-vgc-alpha-1.5-seed0.csv"
COMPUTE = "training step with exact moments as CUDA graphs (wire.capture), CIFAR VGG, B 64, bf16"  # in gpu.csv
WORKERS, SIMULATED, FASTER = (4, 8), "vgc:alpha=1.5", 0.1  # simulated were 8


def rows() -> Iterator[Row]:
    if lacking := missing():
        yield {"what": "step times by replay over shaped links", "against": f"a lab needs {lacking}"}
        return
    for method, rate in CHECKED.items():
        yield checked(method, rate)
    for workers in WORKERS:
        yield replayed(workers)


def checked(method: str, rate: str, hosts: int = HOSTS, counted: int = COUNTED, rounds: int = 2) -> Row:
    """A step of a real training beside its replay.

    What a step computes is the training over links without a limit, less the replay there. Each twice, in turn, and the
    better of two counts, because a core that somebody else has taken makes any of them slower.
    """
    reals = [(trained(method, rate, hosts, counted), trained(method, UNLIMITED, hosts, counted)) for _ in range(rounds)]
    real, free = (min(pair[side][0] for pair in reals) for side in (0, 1))
    trace = reals[0][0][1]  # the same bytes every time
    compute_ms = max(0.0, free - min(played(trace, hosts, UNLIMITED, 0.0) for _ in range(rounds)))
    again = min(played(trace, hosts, rate, compute_ms) for _ in range(rounds))
    what = f"step by replay, digits, {hosts} hosts at {rate} Mbit/s, {method}, {compute_ms:.1f} ms of computing"
    apart = max(again / real, real / again)
    times = {"time_ms": again, "reference_ms": real, "ratio": apart, "bar": WITHIN, "holds": apart <= WITHIN}
    return {"what": f"{what}; ratio: the larger to the smaller", "against": "the real training", **times}


def trained(method: str, rate: str, hosts: int, counted: int) -> tuple[float, ByteTrace]:
    """Milliseconds of the median step of a real run after its first ones, and the bytes of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        files = RaceFiles(Path(folder))
        limits = {"every": 5, "limit_steps": SETTLE + counted}
        (run,) = contest.runs(rate, method, [0], task="digits", hosts=hosts, target=1.0, **limits)
        if failures := race_runner.race([run], files, Quiet()):
            raise SystemExit("\n".join(failures))
        tests = [row for row in files.traced(run) if int(row["step"]) >= SETTLE]
    dense = 4.0 * sum(parameter.numel() for parameter in run.plan().task.make_model().parameters())
    stretches = [
        {name: float(now[name]) - float(then[name]) for name in ("seconds", "step", "bytes_sent")}
        for then, now in itertools.pairwise(tests)
    ]
    samples = [Sample(0, one["bytes_sent"] / one["step"], dense) for one in stretches]
    return median(1e3 * one["seconds"] / one["step"] for one in stretches), ByteTrace(samples, len(samples))


def played(trace: ByteTrace, hosts: int, rate: str, compute_ms: float) -> float:
    """Milliseconds of the median step of the trace."""
    one = ByteTrace(thin(trace.samples, 1), trace.steps)
    setting = Setting(hosts, hosts, compute_ms, steps=PLAYED)
    (row,) = replay(cases(one, setting, trace.collective, []), setting, rate, lambda row: None)
    return float(row["ms_a_step"])


def replayed(workers: int, rate: str = "100", samples: int = 3, steps: int = 3) -> Row:
    """A step of the paper's VGG by VGC and by an all-reduce of bf16; every worker sends what one of eight did."""
    trace, setting = load(EXPERIMENT, samples), Setting(workers, workers, compute_ms(), steps=steps)
    found = replay(cases(trace, setting, "gather", ["bf16"]), setting, rate, lambda row: None)
    ours, theirs = (mean(row["ms_a_step"] for row in found if row["what"] == what) for what in ("trace", "bf16"))
    computing = f"{setting.compute_ms:.1f} ms of computing"
    what = f"step by replay, CIFAR VGG, {workers} hosts at {rate} Mbit/s, {SIMULATED}, {computing}"
    times = {"time_ms": ours, "reference_ms": theirs, "bar": FASTER, "holds": ours <= FASTER * theirs}
    return {"what": what, "against": "bf16 all-reduce", **times}


def compute_ms() -> float:
    """What a step of it takes one GPU, from the committed results."""
    path = Path(__file__).parent / "results" / "gpu.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return next(float(row["measured"]) for row in csv.DictReader(file) if row["what"] == COMPUTE)

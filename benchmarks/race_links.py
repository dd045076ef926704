"""Time to accuracy over shaped links: hosts in network namespaces, which need root.

GRACE's top-k is read from the folder that GRADWIRE_PEERS names (twins.py). A figure of a race is the median of SEEDS.
Every method has the learning rate with which it needs the fewest steps, of four that were tried with other seeds: they
are in results/race-rates.csv, which `python -m benchmarks.race_links` makes anew.
"""

from __future__ import annotations

import csv
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.twins import folder_of, use
from gradwire.tools.lab import missing
from gradwire.tools.race import contest, race_runner
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.race_files import REACHED, RaceFiles
from gradwire.tools.race.race_runner import Figures

Row = dict[str, Any]
HOSTS, TARGET, SEEDS = 4, 0.97, (10, 11, 12, 13, 14)
# By rate: a slow link wants fewer bytes, a faster one fewer steps. Chosen among some 40 settings of VGC in simulations
# with seeds 0 to 9 and 100 to 144, which is why the race has others. 0.25: 1/W.
OURS = {"10": "vgc:alpha=1,density=0.02", "100": "vgc:alpha=0.25,density=0.2"}
GRACE = "python:benchmarks.race_links.grace_topk"
THEIRS = {
    "torch:allreduce": "torch DDP all-reduce",
    "torch:fp16": "torch fp16_compress_hook",
    "torch:powersgd:rank=1": "torch powerSGD_hook rank 1",
    "torch:powersgd:rank=2": "torch powerSGD_hook rank 2",
    "torch:powersgd:rank=4": "torch powerSGD_hook rank 4",
    GRACE: "GRACE top-k 1 %",
}
TUNED, FACTORS, TUNING_SEEDS = Path(__file__).parent / "results" / "race-rates.csv", (1, 2, 4, 8), (0, 1, 2, 3, 4)
UNLIMITED = "unlimited"


class Quiet:
    """Nobody looks at the runs of a benchmark."""

    def show(self, run: RaceRun, state: str, figures: Figures | None = None) -> None: ...


def grace_topk(model: DistributedDataParallel) -> None:
    """1 % of every tensor by itself, as its examples call it, in a hook of DDP: it is the mean that DDP gets."""
    use("grace")
    from grace_dl.dist.helper import grace_from_params

    names = {"compressor": "topk", "memory": "residual", "communicator": "allgather"}
    worker = grace_from_params({**names, "world_size": dist.get_world_size(), "compress_ratio": 0.01})
    named = {id(parameter): name for name, parameter in model.module.named_parameters()}

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and takes no text for them
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.copy_(worker.step(gradient, named[id(parameter)]))
        done: Any = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)


def rows() -> Iterator[Row]:
    if lacking := missing():
        yield {"what": "time to accuracy over shaped links", "against": f"a lab needs {lacking}"}
        return
    for rate in OURS:
        yield from races(rate)


def best_factors() -> dict[str, float]:
    """By method: the factor of the learning rate with the fewest steps to the target. torch's fp16 has all-reduce's."""
    steps: dict[str, dict[float, list[float]]] = {}
    with TUNED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, _, factor = row["method"].partition("@")
            needed = float(row["step"]) if row["state"] == REACHED else math.inf
            steps.setdefault(name, {}).setdefault(float(factor), []).append(needed)
    best = {name: min(tried, key=lambda factor: mean(tried[factor])) for name, tried in steps.items()}
    return best | {"torch:fp16": best["torch:allreduce"]}


def tune() -> None:
    """Every method with every factor, over loopback: how many steps one needs does not depend on the link."""
    named = [f"{name}@{factor}" for name in [*OURS.values(), *THEIRS] if name != "torch:fp16" for factor in FACTORS]
    with tempfile.TemporaryDirectory() as folder:
        files = RaceFiles(Path(folder))
        limits = {"task": "digits", "hosts": HOSTS, "target": TARGET, "limit_steps": 600, "loopback": True}
        every = contest.runs(UNLIMITED, ",".join(named), TUNING_SEEDS, **limits)
        if failures := race_runner.race(
            every, files, Quiet(), loopback=True, command="python -m benchmarks.race_links"
        ):
            raise SystemExit("\n".join(failures))
        shutil.copy(files.results, TUNED)


def races(rate: str, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Seconds to the target, ours against each of theirs, each with its own learning rate."""
    there = [name for name in THEIRS if name != GRACE or folder_of("grace")]
    ours, factors = OURS[rate], best_factors()
    entered = {name: f"{name}@{factors[name]:g}" for name in [ours, *there]}
    with tempfile.TemporaryDirectory() as folder:
        files = RaceFiles(Path(folder))
        every = contest.runs(rate, ",".join(entered.values()), seeds, task="digits", hosts=HOSTS, target=TARGET)
        if failures := race_runner.race(every, files, Quiet()):
            raise SystemExit("\n".join(failures))
        rows = files.rows(every)
    found = {name: [row for run, row in rows if run.method == entered[name]] for name in entered}
    what = f"time to {100 * TARGET:g} % on digits, {HOSTS} hosts at {rate} Mbit/s, {ours} @ {factors[ours]:g}"
    for name, shown in THEIRS.items():
        if name not in there:
            yield {"what": what, "against": f"{shown}: not installed"}
            continue
        sides = found[ours], found[name]
        mine, other = (median(1e3 * float(row["seconds"]) for row in side) for side in sides)
        reached = all(row["state"] == REACHED for row in sides[0])
        steps = " and ".join(f"{median(int(row['step']) for row in side):g}" for side in sides)
        figures = {"time_ms": mine, "reference_ms": other, "bar": 1.0, "holds": reached and mine <= other}
        yield {"what": what, "against": f"{shown} @ {factors[name]:g} (steps: {steps})", **figures}


if __name__ == "__main__":
    tune()

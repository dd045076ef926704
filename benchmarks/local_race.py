"""Local steps against data parallelism and against the local steps of others: time to a loss on slow links. Needs root.

    python -m benchmarks.local_race            all runs, one after another; the same command again goes on
    python -m benchmarks.local_race --tune     first: which learning rate each method has

A byte-level transformer of 875,264 parameters learns Python's own library. torch's DDP with bf16 gradients trains STEPS
steps; the bits per byte that it has then (its test, of the held-out part) are what all race to, with the same optimizer
and batches, and as many steps in a round. torchft races where it is installed (torchft_peer.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.torchft_peer import EVERY
from gradwire.tools.lab import missing
from gradwire.tools.race import contest, race_runner
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.race_files import REACHED, RaceFiles, Row
from gradwire.tools.race.race_runner import RaceTable
from gradwire.tools.result_files import read

RESULTS = Path(__file__).parent / "results" / "local-race"
HOSTS, RATES, SEEDS = 4, ("100", "20"), (10,)
STEPS, MOST_SECONDS = 400, 3600.0  # a method has four times as many to come to where data parallelism was
BATCH = 4  # of a host: 4 of them share this machine's cores, with more of it nobody would wait for a link
TEXT_BYTES = 4_000_000
DATA_PARALLEL = "torch:bf16"
# All elements in 4 bits and more: in a short training as good as averages of float32, step by step, which a tenth of
# the elements is not (30 steps of bf16: 45 steps against 75).
OURS, FEWER = f"vgc:alpha=0,density=1,every={EVERY}", f"vgc:alpha=0,density=0.1,every={EVERY}"
METHODS = {
    OURS: "ours, all elements",
    f"{OURS},delay=5": "ours, all elements, 5 steps late",
    FEWER: "ours, a tenth of the elements",
    f"{FEWER},delay=5": "ours, a tenth, 5 steps late",
    DATA_PARALLEL: "torch DDP, bf16",
    "torch:powersgd:rank=4": "torch powerSGD_hook rank 4",
    f"torch:postlocalsgd:every={EVERY}": "torch post-localSGD",
    "python:benchmarks.torchft_peer.diloco": "torchft DiLoCo",
    "python:benchmarks.torchft_peer.averaging": "torchft DiLoCo, outer step 1",
}
FACTORS, TUNING_SEEDS = (1, 2, 4), (0,)


def methods() -> list[str]:
    """Those that are installed."""
    there = importlib.util.find_spec("torchft") is not None
    return [name for name in METHODS if there or "torchft" not in name]


def text(folder: Path) -> Path:
    """The first megabytes of Python's library, in the order of the names: on every machine, without a download."""
    path, library = folder / "library.txt", Path(sysconfig.get_path("stdlib"))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        parts = (file.read_bytes() for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")))
        content = b"".join(parts)[:TEXT_BYTES]
        path.write_bytes(content)
    return path


def races(files: RaceFiles, rate: str, names: Sequence[str], seeds: Sequence[int], **more: Any) -> list[RaceRun]:
    """Carried out, as far as they are not done."""
    loopback = rate == "unshaped"
    common = {"task": "text", "hosts": HOSTS, "batch": BATCH, "every": EVERY, "limit_s": MOST_SECONDS, **more}
    runs = contest.runs("100" if loopback else rate, ",".join(names), seeds, loopback, **common)
    with RaceTable(runs, f"{rate}, to {runs[0].score.target(runs[0].target)}") as seen:
        failures = race_runner.race(runs, files, seen, loopback, "python -m benchmarks.local_race")
    if failures:
        raise SystemExit("\n".join(failures))
    return runs


def target_of(files: RaceFiles, data: Path, steps: int, seed: int) -> float:
    """What data parallelism has after so many steps, rounded up: sums differ in their last digits from link to link."""
    common = {"data": str(data), "target": 0.01, "limit_steps": steps}
    (run,) = races(files, "unshaped", [with_factor(DATA_PARALLEL)], [seed], **common)
    row = files.find(run)
    assert row is not None
    return math.ceil(500 * float(row["score"])) / 500


def with_factor(name: str) -> str:
    """With the learning rate of the fewest steps among those that were tried."""
    steps: dict[str, list[float]] = {}
    for row in read(RESULTS / "tuning" / "race.csv"):
        found, _, factor = row["method"].partition("@")
        if found == name and factor:
            steps.setdefault(factor, []).append(float(row["step"]) if row["state"] == REACHED else math.inf)
    return f"{name}@{min(steps, key=lambda factor: mean(steps[factor]))}" if steps else name


def tune(data: Path, steps: int) -> None:
    """Over loopback, with other seeds than the race: how many steps one needs does not depend on the link."""
    files = RaceFiles(RESULTS / "tuning")
    named = [f"{name}@{factor}" for name in methods() for factor in FACTORS]
    target = target_of(files, data, steps, TUNING_SEEDS[0])
    races(files, "unshaped", named, TUNING_SEEDS, data=str(data), target=target, limit_steps=4 * steps)


def table(done: Sequence[tuple[RaceRun, Row]], title: str) -> Table:
    """By rate and method the medians of the seeds, and how many times sooner than data parallelism."""
    shown = Table(title=title, title_justify="left")
    for column in ("Mbit/s", "method", "steps", "seconds", "MB on the link", "waited", "sooner"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    seconds: dict[tuple[str, str], float] = {}
    for rate, name in dict.fromkeys((run.rate, run.method.partition("@")[0]) for run, _ in done):
        rows = [row for run, row in done if (run.rate, run.method.partition("@")[0]) == (rate, name)]
        if any(row["state"] != REACHED for row in rows):
            shown.add_row(rate, METHODS[name], rows[0]["step"], "did not reach")
            continue
        steps, link = (median(float(row[key]) for row in rows) for key in ("step", "interface_bytes"))
        seconds[rate, name] = median(float(row["seconds"]) for row in rows)
        base = seconds.get((rate, DATA_PARALLEL))
        sooner = f"{base / seconds[rate, name]:.2f} x" if base else ""
        numbers = (f"{steps:.0f}", f"{seconds[rate, name]:.1f}", f"{link / 1e6:.1f}")
        waits = [float(row["waited"]) / float(row["seconds"]) for row in rows if row["waited"]]
        shown.add_row(rate, METHODS[name], *numbers, f"{100 * median(waits):.1f} %" if waits else "", sooner)
    return shown


def main(
    tuning: Annotated[bool, typer.Option("--tune", help="try learning rates, over loopback")] = False,
    steps: Annotated[int, typer.Option(help="of data parallelism: where it is then is the target")] = STEPS,
    out: Annotated[Path, typer.Option(help="folder of race.csv and trace.csv")] = RESULTS,
) -> None:
    if lacking := missing():
        raise SystemExit(f"a lab needs {lacking}")
    data = text(out / "data")
    if tuning:
        tune(data, steps)
        return
    first = sorted(methods(), key=lambda name: name != DATA_PARALLEL)  # the others are compared with it
    files, done = RaceFiles(out), list[tuple[RaceRun, Row]]()
    for seed in SEEDS:
        target = target_of(files, data, steps, seed)
        for rate in RATES:
            named = [with_factor(name) for name in first]
            limits = {"limit_steps": 4 * steps, "target": target, "data": str(data)}
            done += files.rows(races(files, rate, named, [seed], **limits))
    digest = hashlib.sha256(data.read_bytes()).hexdigest()[:12]
    Console(width=120).print(table(done, f"{HOSTS} hosts, rounds of {EVERY}, text {digest}: time to its loss"))


if __name__ == "__main__":
    typer.run(main)

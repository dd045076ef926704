"""Local steps against data parallelism and against the local steps of others: time to a loss on slow links. Needs root.

    python -m benchmarks.local_race --tune     first: which learning rate each method has
    python -m benchmarks.local_race            all runs, one after another; the same command again goes on

Then the table and the picture in docs/local-steps.md are made anew.

A byte-level transformer of 875,264 parameters learns Python's own library. torch's DDP with bf16 gradients trains STEPS
steps; the bits per byte that it has then (its test, of the held-out part) are what all race to, with the same optimizer
and batches, and as many steps in a round. torchft races where it is installed (torchft_peer.py).
"""

from __future__ import annotations

import importlib.util
import math
import sysconfig
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from benchmarks.report import FIGURES, ROOT, between
from benchmarks.torchft_peer import EVERY
from gradwire.tools.lab import missing
from gradwire.tools.race import contest, plot, race_runner
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.race_files import REACHED, RaceFiles, Row
from gradwire.tools.race.race_runner import RaceTable
from gradwire.tools.result_files import read

RESULTS = Path(__file__).parent / "results" / "local-race"
PAGE, BLOCK = ROOT / "docs" / "local-steps.md", "local-race"
HOSTS, RATES, SEEDS = 4, ("20", "100"), (10,)
STEPS, MOST_SECONDS = 300, 3600.0  # a method has four times as many to come to where data parallelism was
BATCH = 4  # of a host: 4 of them share this machine's cores, with more of it nobody would wait for a link
TEXT_BYTES = 4_000_000
DATA_PARALLEL = "torch:bf16"
OURS, FEWER = f"vgc:alpha=0,density=1,every={EVERY}", f"vgc:alpha=0,density=0.1,every={EVERY}"
LATE = ",delay=5"
METHODS = {
    OURS: "`VGC(alpha=0, density=1)`",
    f"{OURS}{LATE}": "`VGC(alpha=0, density=1)`, `delay=5`",
    FEWER: "`VGC(alpha=0, density=0.1)`",
    f"{FEWER}{LATE}": "`VGC(alpha=0, density=0.1)`, `delay=5`",
    DATA_PARALLEL: "torch DDP, bf16",
    "torch:powersgd:rank=4": "torch powerSGD_hook rank 4",
    f"torch:postlocalsgd:every={EVERY}": "torch post-localSGD",
    "python:benchmarks.torchft_peer.diloco": "torchft DiLoCo",
    "python:benchmarks.torchft_peer.averaging": "torchft DiLoCo, outer step 1",
}
TUNING_SEED = 0


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
    apart = RaceFiles(files.folder / "target")
    (run,) = races(apart, "unshaped", [with_factor(DATA_PARALLEL)], [seed], **common)
    row = apart.find(run)
    assert row is not None
    return math.ceil(500 * float(row["score"])) / 500


def with_factor(name: str) -> str:
    """With the learning rate of the fewest steps among those that were tried; a delay has that of the same without."""
    steps: dict[str, list[float]] = {}
    for row in read(RESULTS / "tuning" / "race.csv"):
        found, _, factor = row["method"].partition("@")
        if found == name.removesuffix(LATE) and factor:
            steps.setdefault(factor, []).append(float(row["step"]) if row["state"] == REACHED else math.inf)
    return f"{name}@{min(steps, key=lambda factor: mean(steps[factor]))}" if steps else name


def tune(data: Path, steps: int) -> None:
    """Over loopback, with another seed than the race: how many steps one needs does not depend on the link.

    From the task's learning rate down by halves, or up, for as long as fewer steps are needed.
    """
    files = RaceFiles(RESULTS / "tuning")
    common = {"data": str(data), "target": target_of(files, data, steps, TUNING_SEED), "limit_steps": 4 * steps}

    def needed(name: str, factor: float) -> float:
        runs = races(files, "unshaped", [f"{name}@{factor:g}"], [TUNING_SEED], **common)
        return seconds([row for _, row in files.rows(runs)], "step")

    for name in methods():
        if not name.endswith(LATE):
            factor, change = 1.0, 0.5 if needed(name, 0.5) < needed(name, 1.0) else 2.0
            while needed(name, factor * change) < needed(name, factor):
                factor *= change


def page_table(rows: Sequence[Row]) -> str:
    """By rate the methods, fastest first: medians over the seeds, and how many times sooner than data parallelism."""
    lines = []
    raced = [row for row in rows if row["rate"] in RATES]
    for rate, group in groupby(sorted(raced, key=lambda row: RATES.index(row["rate"])), key=lambda row: row["rate"]):
        of_rate: dict[str, list[Row]] = {}
        for row in group:
            of_rate.setdefault(row["method"], []).append(row)
        base = next(seconds(found) for name, found in of_rate.items() if name.startswith(DATA_PARALLEL))
        lines += [f"**{rate} Mbit/s**\n"]
        lines += ["| method | learning rate | steps | MB on the link | waited for the others | seconds | sooner |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|"]
        for name, found in sorted(of_rate.items(), key=lambda item: seconds(item[1])):
            lines.append(line(name, found, base))
        lines.append("")
    return "\n".join(lines) + "\n"


def line(name: str, rows: Sequence[Row], base: float) -> str:
    spec, _, factor = name.partition("@")
    steps, link = (median(float(row[key]) for row in rows) for key in ("step", "interface_bytes"))
    waits = [float(row["waited"]) / float(row["seconds"]) for row in rows if row["waited"]]
    waited, time = f"{100 * median(waits):.1f} %" if waits else "", seconds(rows)
    ends = f"{time:.1f} | {base / time:.2f} x" if time < math.inf else "did not reach |"
    return f"| {METHODS[spec]} | x {factor or 1} | {steps:.0f} | {link / 1e6:.1f} | {waited} | {ends} |"


def seconds(rows: Sequence[Row], what: str = "seconds") -> float:
    """To the target, or steps; infinite where a seed did not reach it."""
    return median(float(row[what]) if row["state"] == REACHED else math.inf for row in rows)


def render(text: str) -> str:
    """docs/local-steps.md with the table of the committed race."""
    return between(text, BLOCK, page_table(read(RESULTS / "race.csv")))


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
    files, runs = RaceFiles(out), list[RaceRun]()
    for seed in SEEDS:
        target = target_of(files, data, steps, seed)
        for rate in RATES:
            named = [with_factor(name) for name in first]
            limits = {"limit_steps": 4 * steps, "target": target, "data": str(data)}
            runs += races(files, rate, named, [seed], **limits)
    print(page_table(read(files.results)))
    if out == RESULTS:
        print(plot.draw(runs, files, FIGURES / "local-race.svg"))
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

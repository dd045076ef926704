"""One runner for all benchmarks: prints every row as it comes and writes them to benchmarks/results/.

A row says what was measured, against what, the ratio, the bar and whether it holds. A module of this folder has a
function `rows()` that yields such rows as dicts; to add a benchmark, write one and name it in SUITES.
"""

from __future__ import annotations

import csv
import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from gradwire.tools.provenance import provenance

RESULTS = Path(__file__).parent / "results"
SUITES = {
    "cpu": (
        "encode_cpu",
        "wire_bits",
        "moments_cpu",
        "overlap_cpu",
        "methods_cpu",
        "oracles_cpu",
        "recurrent_cpu",
        "imports_cpu",
        "local_round",
    ),
    "gpu": (
        "fused_linear",
        "fused_convolution",
        "encode_gpu",
        "steps_gpu",
        "moments_gpu",
        "memory_gpu",
        "overlap_gpu",
        "simulate_gpu",
    ),
    "links": ("auto_links", "loopback_links", "race_links", "replay_links"),
}
COLUMNS = ("benchmark", "what", "against", "measured", "reference", "unit", "ratio", "bar", "holds")
Row = dict[str, Any]

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 160)


def normal(benchmark: str, row: Row) -> Row:
    """A row in the columns of the CSV: times are milliseconds, everything else says its unit.

    A row without numbers is of something that cannot be measured, and `against` says why.
    """
    timed, empty = "time_ms" in row, not {"time_ms", "value"} & row.keys()
    bar = row.get("bar")
    numbers = {"measured": "", "reference": "", "ratio": ""}
    if not empty:
        measured, reference = (row["time_ms"], row["reference_ms"]) if timed else (row["value"], row["reference"])
        ratio = row.get("ratio") or measured / reference
        shown = f"{ratio:.3f}"
        if bar is not None and (float(shown) <= bar) != (ratio <= bar):
            shown = f"{ratio:.7g}"  # a miss by less than a thousandth is shown as one
        numbers = {"measured": f"{measured:.5g}", "reference": f"{reference:.5g}", "ratio": shown}
    return {
        "benchmark": benchmark,
        "what": row["what"],
        "against": row["against"],
        **numbers,
        "unit": "ms" if timed else row.get("unit", ""),
        "bar": "" if bar is None else f"{bar:g}",
        "holds": "" if bar is None else ("yes" if row["holds"] else "NO"),
    }


def measured_rows(name: str) -> Iterator[Row]:
    start = time.perf_counter()
    with console.status(f"{name} ..."):
        for row in importlib.import_module(f"benchmarks.{name}").rows():
            shown = normal(name, row)
            bar = f"  bar {shown['bar']}: {shown['holds']}" if shown["bar"] else ""
            console.print(
                f"{shown['what']}: {shown['measured']} {shown['unit']} against {shown['against']} "
                f"{shown['reference']}, ratio {shown['ratio']}{bar}",
                highlight=False,
            )
            yield shown
    console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s[/dim]")


def run(suite: str, only: list[str], out: Path) -> None:
    names = only or SUITES[suite]
    unknown = set(names) - set(SUITES[suite])
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: {suite} has {', '.join(SUITES[suite])}")
    origin = provenance() | {"command": " ".join(["python -m benchmarks", suite, *only])}
    if torch.cuda.is_available():
        origin["hardware"] = torch.cuda.get_device_name()
    for name in names:  # written after each: a later one that fails takes nothing along
        rows = [row | origin for row in measured_rows(name)]
        _write(out, (*COLUMNS, *origin), [row for row in _old(out) if row["benchmark"] != name] + rows)
        failed = sum(row["holds"] == "NO" for row in rows)
        console.print(f"{len(rows)} rows, {failed} below their bar, written to {out.name}")


def _write(path: Path, columns: Iterable[str], rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _old(path: Path) -> list[Row]:
    """The rows that are there: a run of some benchmarks leaves those of the others alone."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@app.command()
def cpu(only: list[str] = typer.Argument(None), out: Path = RESULTS / "cpu.csv") -> None:  # noqa: B008
    """On this machine's processor, in minutes."""
    run("cpu", only or [], out)


@app.command()
def gpu(only: list[str] = typer.Argument(None), out: Path = RESULTS / "gpu.csv") -> None:  # noqa: B008
    """On a CUDA device."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here; `python -m benchmarks cpu` needs none")
    run("gpu", only or [], out)


@app.command()
def links(only: list[str] = typer.Argument(None), out: Path = RESULTS / "links.csv") -> None:  # noqa: B008
    """Between hosts of a lab on this machine; needs root, and nothing else running."""
    run("links", only or [], out)


@app.command()
def against(old: str, names: list[str], rounds: int = 3, out: Path | None = None) -> None:
    """Benchmarks NAMES with the code of today and that of OLD, a commit or a folder, in turn: who is slower?"""
    importlib.import_module("benchmarks.against").run(old, names, rounds, out)


@app.command()
def docs() -> None:
    """Writes the tables and pictures of the pages in docs/ from the committed results."""
    importlib.import_module("benchmarks.report").write()


if __name__ == "__main__":
    app()

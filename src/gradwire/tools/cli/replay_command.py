"""`gradwire replay`: how long a step takes over a link, from the bytes that a run has counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from gradwire.tools.cli.exit_codes import FAILED, readable_errors
from gradwire.tools.cli.options import Loopback, Rates
from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.commands import CommandError
from gradwire.tools.lab.rates import parse_link
from gradwire.tools.provenance import provenance
from gradwire.tools.race import events
from gradwire.tools.race.replay import BESIDE, COLLECTIVES, Case, Row, Setting, cases
from gradwire.tools.race.replay import replay as play
from gradwire.tools.race.trace import ByteTrace, load
from gradwire.tools.result_files import append

MOST_HOSTS = 8  # by default: each is a process that imports torch


def replay(
    trace: Annotated[Path, Argument(help="CSV of a run: of `gradwire experiment`, or a row a step of StepBytes")],
    workers: Annotated[int, Option(help="as many as would train")] = 8,
    hosts: Annotated[int | None, Option(help="network namespaces; fewer than workers send more each [up to 8]")] = None,
    rates: Rates = "100,1000",
    compute_ms: Annotated[float, Option(help="what a step computes on one worker, measured without a network")] = 0.0,
    overlap: Annotated[
        bool, Option("--overlap", help="buckets go while the backward does, a round while the next")
    ] = False,
    collective: Annotated[str, Option(help="gather (messages), sum, or auto, which the bytes tell")] = "auto",
    beside: Annotated[str, Option(help="sums to compare with, between commas; '' for none")] = "dense,bf16",
    samples: Annotated[int, Option(help="places of the run that are replayed: the median of a section each")] = 5,
    steps: Annotated[int, Option(help="times that each is replayed, after two to warm up; the median counts")] = 5,
    bucket_mib: Annotated[float, Option(help="of DDP's buckets; the first has 1")] = 25.0,
    out: Annotated[Path, Option(help="CSV of all steps")] = Path("replay.csv"),
    loopback: Loopback = False,
) -> None:
    """Exchange the bytes of a run over real links, without its model: for models and workers that do not fit here."""
    with readable_errors():
        found = load(trace, samples)
        links = ["unshaped"] if loopback else checked(rates)
        others = chosen(beside)
        if collective not in ("auto", *COLLECTIVES):
            raise InputError(f"--collective {collective}: auto, {' or '.join(COLLECTIVES)}")
        n_hosts = min(workers, MOST_HOSTS) if hosts is None else hosts
        setting = Setting(workers, n_hosts, compute_ms, overlap, steps, bucket_mib)
        kind = found.collective if collective == "auto" else collective
        events.check_lab(loopback)
        if out.is_dir() or not out.parent.is_dir():
            raise InputError(f"--out {out}: give a file in a folder that is there")
        out.unlink(missing_ok=True)
        try:
            rows = run(cases(found, setting, kind, others), setting, links, out, loopback)
        except CommandError as error:
            typer.echo(f"gradwire: {error}", err=True)
            raise typer.Exit(FAILED) from None
    Console().print(table(rows, found, trace.stem, setting))
    typer.echo(f"all steps in {out}")


def checked(rates: str) -> list[str]:
    """Rates between commas."""
    links = [rate.strip() for rate in rates.split(",") if rate.strip()]
    for rate in links:
        parse_link(rate)
    if not links:
        raise InputError("no rate: --rates 100,1000")
    return links


def chosen(beside: str) -> list[str]:
    """Sums between commas."""
    names = [name.strip() for name in beside.split(",") if name.strip()]
    if unknown := set(names) - set(BESIDE):
        raise InputError(f"--beside {', '.join(sorted(unknown))}: known are {', '.join(BESIDE)}")
    return names


def run(every: Sequence[Case], setting: Setting, rates: Sequence[str], out: Path, loopback: bool) -> list[Row]:
    """Every rate, with a row in the file as each step is done."""
    origin, rows = provenance("cpu", "gradwire replay"), list[Row]()

    def write(row: Row) -> None:
        shown = {name: f"{value:.8g}" if isinstance(value, float) else str(value) for name, value in row.items()}
        append(out, shown | origin)

    for rate in rates:
        with Console(stderr=True).status(f"{len(every)} steps, {setting.steps} times each, at {rate} ..."):
            rows += play(every, setting, rate, write, loopback)
    return rows


def table(rows: Sequence[Row], trace: ByteTrace, name: str, setting: Setting) -> Table:
    """By rate: the trace, the mean over its sections, and the sums beside it."""
    fewer = f" on {setting.hosts} hosts" if setting.hosts < setting.workers else ""
    shown = Table(
        title=f"{setting.workers} workers{fewer}, {setting.compute_ms:g} ms of computing a step",
        title_justify="left",
        caption=f"{name}: mean over {len(trace.samples)} places of {trace.steps} steps, each the median of "
        f"{setting.steps} replays",
    )
    for column in ("rate", "what", "KB sent", "KB on the link", "ms a step", "whole run"):
        shown.add_column(column, justify="left" if column == "what" else "right")
    for rate, what in dict.fromkeys((row["rate"], row["what"]) for row in rows):
        these = [row for row in rows if (row["rate"], row["what"]) == (rate, what)]
        sent, link, ms = (mean(row[key] for row in these) for key in ("bytes_a_step", "link_bytes", "ms_a_step"))
        hours = ms * trace.steps / 3.6e6
        whole = f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"
        label = name if what == "trace" else what
        shown.add_row(str(rate), label, f"{sent / 1e3:,.1f}", f"{link / 1e3:,.1f}", f"{ms:,.1f}", whole)
    return shown

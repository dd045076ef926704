"""All runs of a race, one after another, each in a lab of its own: those that are done are skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gradwire.tools.lab.commands import CommandError
from gradwire.tools.provenance import provenance
from gradwire.tools.race import events
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.events import Event
from gradwire.tools.race.race_files import RaceFiles

HOST = "gradwire.tools.race.contestant"
Figures = Mapping[str, Any]
COLUMNS = ("rate", "method", "seed", "steps", "score", "seconds", "ms a step", "MB on the link", "state")
LEFT = ("method", "state")
UNITS = ("seconds", "ms a step", "MB on the link")


def cells(run: RaceRun, state: str, figures: Figures | None) -> list[str]:
    """One row of the table."""
    rate = f"{run.rate} Mbit/s" if run.rate.replace(".", "").isdecimal() else run.rate
    first = [rate, run.method, str(run.seed)]
    if figures is None:
        return [*first, *[""] * 5, state]
    seconds, steps, link = float(figures["seconds"]), int(figures["step"]), figures["interface_bytes"]
    numbers = [
        str(steps),
        run.score.show(float(figures["score"])),
        f"{seconds:.2f}",
        f"{1e3 * seconds / steps:.1f}",
    ]
    return [*first, *numbers, f"{float(link) / 1e6:.2f}" if link not in (None, "") else "", state]


def labelled(name: str, cell: str) -> str:
    """A cell outside of its table: what needs no name is left alone, a unit follows its number."""
    if name in ("rate", "method", "state"):
        return cell
    return f"{cell} {name}" if name in UNITS else f"{name} {cell}"


class RaceTable:
    """What the user sees: a table that fills while it runs on a terminal, a line a run elsewhere.

    Told how far each run has come; `figures` has what race.csv has, as numbers or as text.
    """

    def __init__(self, runs: Sequence[RaceRun], title: str) -> None:
        self.console, self.title = Console(), title
        self.rows = {run: cells(run, "waiting", None) for run in runs}
        self.live = Live(console=self.console, refresh_per_second=4, vertical_overflow="visible")

    def __enter__(self) -> RaceTable:
        if self.console.is_terminal:
            self.live.start()
            self.draw()
        else:
            self.console.print(self.title, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:
            self.live.stop()

    def show(self, run: RaceRun, state: str, figures: Figures | None = None) -> None:
        """The table again, or the line of a run that has ended."""
        self.rows[run] = cells(run, state, figures)
        if self.live.is_started:
            self.draw()
        elif state not in ("running", "waiting"):
            named = zip(COLUMNS, self.rows[run], strict=True)
            words = (labelled(name, cell) for name, cell in named if cell)
            self.console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)

    def draw(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
        styles = {"running": "bold", "reached": "green", "did not reach": "yellow", "failed": "red"}
        for row in self.rows.values():
            table.add_row(*row, style=styles.get(row[-1], "dim"))
        self.live.update(table)


def race(
    runs: Sequence[RaceRun], files: RaceFiles, watcher: RaceTable, loopback: bool = False, command: str = ""
) -> list[str]:
    """Run what is not done yet; returns what went wrong with those that failed, and goes on after them."""
    failures, origin = [], provenance("cpu", command)
    for run in runs:
        if (row := files.find(run)) is not None:
            watcher.show(run, row["state"], row)
            continue
        try:
            race_one(run, files, watcher, loopback, origin)
        except CommandError as error:
            failures.append(f"{run.method} at {run.rate}: {error}")
            watcher.show(run, "failed")
    return failures


def race_one(run: RaceRun, files: RaceFiles, watcher: RaceTable, loopback: bool, origin: dict[str, str]) -> None:
    """One run, from the start of its hosts to its row."""
    last: Event = {}

    def tell(standing: Event) -> None:
        last.update(standing)
        files.test(run, standing)
        if not standing["state"]:
            watcher.show(run, "running", standing)

    files.begin(run)
    watcher.show(run, "running")
    with events.open_hosts(run.hosts, run.rate, loopback) as hosts:
        events.watch(hosts, HOST, asdict(run), tell)
    if not last.get("state"):
        raise CommandError("its hosts ended without a word of how", 1)
    row = files.end(run, last, origin)
    watcher.show(run, row["state"], row)

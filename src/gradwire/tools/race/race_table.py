"""What the user sees of a race: a table that fills while it runs on a terminal, a line a run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gradwire.tools.race.contest import RaceRun

Figures = Mapping[str, Any]
COLUMNS = ("rate", "method", "seed", "steps", "accuracy", "seconds", "ms a step", "MB on the link", "state")
LEFT = ("method", "state")
UNITS = ("seconds", "ms a step", "MB on the link")


class Watcher(Protocol):
    """Told how far each run has come; `figures` has what race.csv has, as numbers or as text."""

    def show(self, run: RaceRun, state: str, figures: Figures | None = None) -> None: ...


def cells(run: RaceRun, state: str, figures: Figures | None) -> list[str]:
    """One row of the table."""
    rate = f"{run.rate} Mbit/s" if run.rate.replace(".", "").isdecimal() else run.rate
    first = [rate, run.method, str(run.seed)]
    if figures is None:
        return [*first, *[""] * 5, state]
    seconds, steps, link = float(figures["seconds"]), int(figures["step"]), figures["interface_bytes"]
    numbers = [
        str(steps),
        f"{100 * float(figures['accuracy']):.1f} %",
        f"{seconds:.2f}",
        f"{1e3 * seconds / steps:.1f}",
    ]
    return [*first, *numbers, f"{float(link) / 1e6:.2f}" if link not in (None, "") else "", state]


def labelled(name: str, cell: str) -> str:
    """A cell outside of its table: what needs no name is left alone, a unit follows its number."""
    if name in ("rate", "method", "state"):
        return cell
    return f"{cell} {name}" if name in UNITS else f"{name} {cell}"


class Lines:
    """One line a run, when it has ended."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def show(self, run: RaceRun, state: str, figures: Figures | None = None) -> None:
        if state in ("running", "waiting"):
            return
        named = zip(COLUMNS, cells(run, state, figures), strict=True)
        words = (labelled(name, cell) for name, cell in named if cell)
        self.console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)


class Board:
    """The whole table, drawn again when a figure changes."""

    def __init__(self, live: Live, runs: Sequence[RaceRun], title: str) -> None:
        self.live, self.title = live, title
        self.rows = {run: cells(run, "waiting", None) for run in runs}
        self.draw()

    def show(self, run: RaceRun, state: str, figures: Figures | None = None) -> None:
        self.rows[run] = cells(run, state, figures)
        self.draw()

    def draw(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
        styles = {"running": "bold", "reached": "green", "did not reach": "yellow", "failed": "red"}
        for row in self.rows.values():
            table.add_row(*row, style=styles.get(row[-1], "dim"))
        self.live.update(table)


@contextmanager
def watcher(runs: Sequence[RaceRun], title: str) -> Iterator[Watcher]:
    """The one that suits the standard output."""
    console = Console()
    if not console.is_terminal:
        console.print(title, highlight=False, soft_wrap=True)
        yield Lines(console)
        return
    with Live(console=console, refresh_per_second=4, vertical_overflow="visible") as live:
        yield Board(live, runs, title)

"""The files of a race, written as its results come, and read to skip what is done.

race.csv     one row a run: what it was, how it ended, where the figures come from
trace.csv    one row a test: seconds, step, score and bytes of a run
"""

from __future__ import annotations

from pathlib import Path

from gradwire.tools.input_errors import InputError
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.events import Event
from gradwire.tools.result_files import append, keep, read

Row = dict[str, str]
REACHED = "reached"
FIGURES = ("seconds", "step", "score", "bytes_sent", "interface_bytes", "waited")


class RaceFiles:
    """Of all races in one folder."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder} is a file, a folder was expected")
        self.folder, self.results, self.trace = folder, folder / "race.csv", folder / "trace.csv"

    def find(self, run: RaceRun) -> Row | None:
        """The row of a run that is done. One that did not reach its target is done if its limits were no lower."""
        for row in _rows(self.results):
            if _is_of(row, run):
                within = float(row["limit_s"]) >= run.limit_s and int(row["limit_steps"]) >= run.limit_steps
                if row["state"] == REACHED or within:
                    return row
        return None

    def begin(self, run: RaceRun) -> None:
        """What a run that was cut, or had lower limits, has left goes away."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.results, self.trace):
            keep(path, [row for row in _rows(path) if not _is_of(row, run)])

    def test(self, run: RaceRun, standing: Event) -> None:
        """One more row of the trace."""
        append(self.trace, run.key() | figures(standing))

    def end(self, run: RaceRun, standing: Event, origin: Row) -> Row:
        """The row of a run that has ended."""
        limits = {"limit_s": f"{run.limit_s:g}", "limit_steps": str(run.limit_steps)}
        row = run.key() | limits | {"state": standing["state"]} | figures(standing) | origin
        append(self.results, row)
        return row

    def rows(self, runs: list[RaceRun]) -> list[tuple[RaceRun, Row]]:
        """Those that are done."""
        return [(run, row) for run in runs if (row := self.find(run)) is not None]

    def traced(self, run: RaceRun) -> list[Row]:
        """The tests of a run."""
        return [row for row in _rows(self.trace) if _is_of(row, run)]


def figures(standing: Event) -> Row:
    """Numbers as text; what nobody counted is empty."""
    shown = {name: standing[name] for name in FIGURES}
    return {name: "" if value is None else f"{value:.10g}" for name, value in shown.items()}


def _rows(path: Path) -> list[Row]:
    """A row that was cut in the middle, when the machine stopped, is none."""
    return [row for row in read(path) if None not in row and None not in row.values()]


def _is_of(row: Row, run: RaceRun) -> bool:
    return all(row.get(name) == value for name, value in run.key().items())

"""The picture of a race: its score against seconds, and how long each method took to the target; one column a rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.race_files import REACHED, RaceFiles, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Done = list[tuple[RaceRun, Row]]


def draw(runs: Sequence[RaceRun], files: RaceFiles, path: Path) -> str:
    """Write the picture; returns why there is none, or nothing."""
    done = files.rows(list(runs))
    if not done:
        return "nothing to draw"
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install gradwire[plots], then the same command draws it"
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"  # or every run would make another file
    from matplotlib import pyplot

    rates = list(dict.fromkeys(run.rate for run, _ in done))
    names = list(dict.fromkeys(run.method for run, _ in done))
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    size = 1 + 4.5 * len(rates), 4 + 0.4 * len(names)
    figure, axes = pyplot.subplots(2, len(rates), figsize=size, squeeze=False, layout="constrained")
    for column, rate in enumerate(rates):
        here = [(run, row) for run, row in done if run.rate == rate]
        curves(axes[0][column], here, files, colors)
        bars(axes[1][column], here, colors)
        axes[0][column].set_title(f"{rate} Mbit/s" if rate.replace(".", "").isdecimal() else rate)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return ""


def curves(axes: Axes, done: Done, files: RaceFiles, colors: dict[str, str]) -> None:
    """The score against seconds, a line a run; seeds of a method share its colour."""
    named: set[str] = set()
    score = done[0][0].score
    unit = 1 if score.falls else 100
    for run, _ in done:
        tests = files.traced(run)
        label: dict[str, Any] = {} if run.method in named else {"label": run.method}
        named.add(run.method)
        seconds, values = ([float(row[name]) for row in tests] for name in ("seconds", "score"))
        axes.plot(seconds, [unit * value for value in values], color=colors[run.method], linewidth=1, **label)
    axes.axhline(unit * done[0][0].target, color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(score.words if score.falls else f"{score.words}, %")


def bars(axes: Axes, done: Done, colors: dict[str, str]) -> None:
    """Seconds to the target: the median of the seeds, where all of them reached it."""
    names = list(dict.fromkeys(run.method for run, _ in done))
    for place, name in enumerate(names):
        rows = [row for run, row in done if run.method == name]
        reached = all(row["state"] == REACHED for row in rows)
        value = median(float(row["seconds"]) for row in rows)
        axes.barh(place, value, color=colors[name], alpha=1 if reached else 0.25)
        axes.text(value, place, f" {value:.1f} s" if reached else " did not reach", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(f"seconds to {done[0][0].score.target(done[0][0].target)}")

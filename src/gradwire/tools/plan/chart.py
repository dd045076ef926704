"""The picture of a plan: step time against bandwidth and against workers, a line a method. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.plan.model import Network, predict
from gradwire.tools.plan.report import PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = [10 ** (place / 10) for place in range(51)]  # Mbit/s, 1 to 100,000
WORKERS = [2**place for place in range(1, 13)]  # to 4,096
KINDS = ("svg", "png", "pdf")


def refusal(path: Path) -> str:
    """Why no chart can be written there, or nothing; asked before anything starts."""
    if path.suffix[1:].lower() not in KINDS:
        return f"{path}: a chart is a file of {', '.join('.' + kind for kind in KINDS)}"
    if not path.absolute().parent.is_dir():
        return f"{path}: there is no folder {path.absolute().parent}"
    if importlib.util.find_spec("matplotlib") is None:
        return "a chart needs matplotlib: pip install gradwire[plots]"
    return ""


def draw(report: PlanReport, path: Path) -> None:
    """Two panels side by side, log axes, the present point marked."""
    import matplotlib

    matplotlib.use("svg" if path.suffix.lower() == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"  # or every run would make another file
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    network = report.network
    mbit = min(max(network.mbit, RATES[0]), RATES[-1])
    panel(left, report, RATES, [replace(network, mbit=rate) for rate in RATES], mbit)
    left.set_xlabel(f"Mbit/s of every worker's link, {network.workers} workers")
    left.set_ylabel("step, ms")
    panel(right, report, WORKERS, [with_workers(network, workers) for workers in WORKERS], network.workers)
    rate = "no limit" if math.isinf(network.mbit) else f"{network.mbit:,.4g} Mbit/s"
    right.set_xlabel(f"workers, {rate}")
    right.legend(fontsize=8)
    figure.suptitle(f"{report.title}: {report.work.numel:,} parameters. {report.verdict.words}", fontsize=9, wrap=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    pyplot.close(figure)


def with_workers(network: Network, workers: int) -> Network:
    """More of the same. What collectives reach between two, over one connection for both ways, is theirs alone."""
    curve = network.curve if (workers == 2) == (network.workers == 2) else ()
    return replace(network, workers=workers, curve=curve)


def panel(axes: Axes, report: PlanReport, places: Sequence[float], networks: Sequence[Network], now: float) -> None:
    """A line a method; the chosen one is thick."""
    for number, cost in enumerate(report.costs):
        chosen = cost.spec == report.verdict.chosen
        times = [predict(report.work, network, cost).step_ms for network in networks]
        style = "-." if cost.local is not None else "--" if cost.is_cast else "-"
        axes.plot(places, times, style, color=f"C{number % 10}", linewidth=2.2 if chosen else 1.2, label=cost.spec)
        axes.plot([now], [report.verdict.predictions[cost.spec].step_ms], "o", color=f"C{number % 10}", markersize=5)
    axes.axvline(now, color="black", linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", linewidth=0.3)

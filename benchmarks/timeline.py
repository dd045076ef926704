"""docs/figures/overlap.svg from results/overlap.csv: the lanes of one training step, one under the other."""

from __future__ import annotations

import csv
from pathlib import Path

LANES = ("forward", "backward", "encode", "exchange", "decode", "optimizer")
COLOURS = ("#9aa5b1", "#3b7dd8", "#d8663b", "#e0a93b", "#5aa469", "#9aa5b1")


def draw(spans: Path, picture: Path) -> None:
    """Work of DDP's buckets stands beneath the backward that it runs beside."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"  # or every run would make another file
    from matplotlib import pyplot

    with spans.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(10, 2.6), layout="constrained")
    for height, (lane, colour) in enumerate(zip(LANES, COLOURS, strict=True)):
        times = [(float(row["begin_ms"]), float(row["end_ms"])) for row in rows if row["lane"] == lane]
        axes.broken_barh(
            [(begin, end - begin) for begin, end in times], (height - 0.35, 0.7), color=colour, linewidth=0
        )
    end_ms = max(float(row["end_ms"]) for row in rows if row["lane"] == "backward")
    axes.axvline(end_ms, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(" end of the backward", (end_ms, 0), fontsize=8, verticalalignment="center")
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one training step, rank 0")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)

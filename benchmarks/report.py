"""The docs' tables and pictures from the committed results: `python -m benchmarks docs`.

The pages' text is written by hand; between two markers stands what this program makes of the CSVs: the rows of the
methods in docs/methods.md, those over shaped links in docs/links.md, all others in docs/performance.md.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks import report_methods, timeline

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
PAGE, METHODS_PAGE, LINKS_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("performance", "methods", "links"))
SUITES, LINKS = ("gpu", "cpu"), "links"
METHODS = {"methods_cpu": report_methods.tables, "oracles_cpu": report_methods.oracles}  # on a page of their own
Row = dict[str, str]


def read(suite: str) -> list[Row]:
    path = RESULTS / f"{suite}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def of_parts(suite: str) -> list[Row]:
    """The rows of docs/performance.md and docs/links.md."""
    return [row for row in read(suite) if row["benchmark"] not in METHODS]


def table(rows: list[Row]) -> str:
    """All rows of one suite, losses in bold, benchmark by benchmark."""
    lines = []
    for benchmark, group in groupby(rows, key=lambda row: row["benchmark"]):
        found = list(group)
        lines += [f"\n**{benchmark}** ({found[0]['hardware']}, torch {found[0]['torch']}, `{found[0]['command']}`)\n"]
        lines += ["| what | measured | against | ratio | bar |", "|---|---|---|---|---|"]
        for row in found:
            verdict = {"yes": f"{row['bar']}, holds", "NO": f"**{row['bar']}, missed**", "": ""}[row["holds"]]
            reference = f"{row['against']} {row['reference']} {row['unit']}"
            lines.append(
                f"| {row['what']} | {row['measured']} {row['unit']} | {reference} | {row['ratio']} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def picture(suite: str, rows: list[Row]) -> str:
    """Every row that has a bar: its ratio as a bar, the bar as a mark."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"  # or every run would make another file
    from matplotlib import pyplot

    judged = [row for row in rows if row["bar"]]
    if not judged:
        return ""
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.34 * len(judged)), layout="constrained")
    places = range(len(judged))
    colours = ["#3b7dd8" if row["holds"] == "yes" else "#d8663b" for row in judged]
    axes.barh(places, [float(row["ratio"]) for row in judged], color=colours, height=0.6)
    axes.plot([float(row["bar"]) for row in judged], places, "k|", markersize=16, label="bar")
    axes.set_yticks(places, [row["what"] for row in judged], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ratio (less is better; orange: above its bar)")
    axes.legend(loc="lower right")
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"performance_{suite}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"![{suite}](figures/performance_{suite}.svg)\n"


def between(text: str, name: str, block: str) -> str:
    """A page with the block of that name written anew."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the page does not have the lines {begin.strip()} and {end.strip()}, in this order")
    return before + begin + block + end + after


def render(text: str, suites: Sequence[str] = SUITES) -> str:
    """docs/performance.md, or docs/links.md, with the block of every suite written anew."""
    for suite in suites:
        rows = of_parts(suite)
        figure = f"![{suite}](figures/performance_{suite}.svg)\n" if any(row["bar"] for row in rows) else ""
        text = between(text, suite, figure + table(rows))
    return text


def render_methods(text: str) -> str:
    """docs/methods.md with its tables written anew."""
    for benchmark, make in METHODS.items():
        text = between(text, benchmark, make([row for row in read("cpu") if row["benchmark"] == benchmark]))
    return text


def write() -> None:
    for suite in (*SUITES, LINKS):
        picture(suite, of_parts(suite))
    timeline.draw(RESULTS / "overlap.csv", FIGURES / "overlap.svg")
    for page, renew in ((PAGE, render), (METHODS_PAGE, render_methods), (LINKS_PAGE, partial(render, suites=[LINKS]))):
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")

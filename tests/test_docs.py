"""Figures in the docs are those of the committed results, which one command remakes."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import local_race, report
from benchmarks.__main__ import COLUMNS, SUITES
from benchmarks.overlap_gpu import Kernel, Mark, Span, inside, spans_of
from gradwire.tools.train.demo import METHODS

ROOT = Path(__file__).parent.parent


def program(name: str) -> ModuleType:
    """One of docs/, which are in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def remake() -> ModuleType:
    return program("remake")


def test_the_picture_and_the_table_of_rooms_are_those_of_the_source() -> None:
    rooms = program("rooms")
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert text == rooms.rendered(text), "make rooms"
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), "make rooms"
    order = rooms.order()
    assert all(order.index(upper) < order.index(lower) for upper, lower in rooms.imports()), "imports go down"
    assert all(rooms.purpose(room).endswith(".") for room in order), "every room says in one line what it is for"


def test_the_readme_shows_what_the_csv_holds(remake):
    _, block, _ = remake.split((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block == remake.render(remake.read_records()), "make docs-demo, or .venv/bin/python docs/remake.py --render"


def test_the_csv_is_of_the_whole_demo_and_says_where_it_comes_from(remake):
    records = remake.read_records()
    assert [record["method"] for record in records] == list(METHODS)
    for record in records:
        assert record["command"] == "gradwire demo --csv docs/results/demo.csv"
        assert all(record[name] for name in ("commit", "gradwire", "torch", "python"))
        assert record["hardware"].endswith(" cores")
        assert "/" not in record["hardware"], "no folder or device of a machine"


def test_what_the_readme_says_of_the_accuracies_is_so(remake):
    """It calls them equal: they are at most two test images of 360 apart."""
    accuracies = [float(record["accuracy"]) for record in remake.read_records()]
    assert max(accuracies) - min(accuracies) < 2.5 / 360


def test_a_readme_without_the_markers_is_not_written_over(remake):
    with pytest.raises(SystemExit, match="does not have the lines"):
        remake.split("<!-- demo:begin -->\n")


def test_the_page_of_performance_shows_what_the_csvs_hold():
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.render(text), "python -m benchmarks docs"


def test_the_page_of_local_steps_shows_what_the_race_brought():
    text = local_race.PAGE.read_text(encoding="utf-8")
    assert text == local_race.render(text), "python -m benchmarks.local_race"


def test_the_page_of_links_shows_what_the_csv_holds():
    text = report.LINKS_PAGE.read_text(encoding="utf-8")
    assert text == report.render(text, [report.LINKS]), "python -m benchmarks docs"


def test_the_page_of_methods_shows_what_the_csv_holds_and_names_every_method_in_it():
    text = report.METHODS_PAGE.read_text(encoding="utf-8")
    assert text == report.render_methods(text), "python -m benchmarks docs"
    told = text.partition("## One by one")[2]
    measured = {re.split(r"[:,]", row["what"])[0] for row in report.read("cpu") if row["benchmark"] == "methods_cpu"}
    assert len(measured) > 10
    assert all(f"**`{name}" in told for name in measured)


@pytest.mark.parametrize("suite", SUITES)
def test_results_have_all_columns_and_name_no_folder(suite):
    rows = report.read(suite)
    assert {row["benchmark"] for row in rows} == set(SUITES[suite])
    for row in rows:
        assert set(COLUMNS) <= row.keys()
        assert row["command"].startswith("python -m benchmarks")
        assert "/" not in row["command"] + row["hardware"]
        if row["bar"]:  # a miss is not hidden
            assert row["holds"] == ("yes" if judged(row) else "NO"), row["what"]


def judged(row):
    """Less is better; of a speed, more."""
    ratio, bar = float(row["ratio"]), float(row["bar"])
    return ratio >= bar if "a second" in row["what"] else ratio <= bar


def test_the_picture_of_a_step_is_of_the_row_beside_it():
    with (report.RESULTS / "overlap.csv").open(encoding="utf-8", newline="") as file:
        spans = [Span(r["lane"], r["name"], float(r["begin_ms"]), float(r["end_ms"])) for r in csv.DictReader(file)]
    (row,) = (row for row in report.read("gpu") if row["benchmark"] == "overlap_gpu")
    assert inside(spans) == pytest.approx((float(row["measured"]), float(row["reference"])), rel=1e-3)
    assert "(figures/overlap.svg)" in report.PAGE.read_text(encoding="utf-8")


def test_spans_of_a_step_are_where_its_kernels_ran():
    """A backward until 4 ms whose last bucket is ready at 3 ms: one is encoded beside it, one after it."""
    ms = 1_000_000
    marks = [Mark(0, 6 * ms, "backward"), Mark(1 * ms, 1 * ms, "ready"), Mark(3 * ms, 3 * ms, "ready")]
    kernels = [Kernel(0, 1 * ms, 4 * ms, True), Kernel(5 * ms, 5 * ms, 6 * ms, True)]  # the last: copies after the wait
    for at in (1 * ms, 4 * ms):
        marks += [Mark(at, at + ms // 4, "encode"), Mark(at + ms // 4, at + ms, "exchange")]
        kernels += [Kernel(at, at, at + ms // 4, False), Kernel(at, at + ms // 4, at + ms // 2, False)]
    spans = spans_of(sorted(marks), kernels)
    assert [(s.name, s.begin_ms, s.end_ms) for s in spans if s.lane == "backward"] == [("backward", 1, 4)]
    assert [(s.name, s.begin_ms, s.end_ms) for s in spans if s.lane == "exchange"] == [
        ("bucket 1", 1.5, 2),
        ("bucket 2", 4.5, 5),
    ]
    assert inside(spans) == (1, 2)

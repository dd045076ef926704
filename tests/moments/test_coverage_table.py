"""docs/coverage.md: no moment that is called exact is off, and the table says what this code does."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import coverage

ROOT = Path(__file__).parents[2]
# packages that lie beside the others, see the Makefile
FOUND = importlib.util.find_spec("torchvision") or (Path(sys.prefix) / "models" / "torchvision").exists()
# what may differ from machine to machine
MEASURED = ("error", "worst")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> list[coverage.Record]:
    """Measured by a process of its own: once torchvision is there, transformers imports it."""
    if not FOUND:
        pytest.skip("torchvision and timm are not installed: `make coverage` does it")
    path = tmp_path_factory.mktemp("coverage") / "coverage.csv"
    code = f"from benchmarks import coverage as c; from pathlib import Path; c.write(c.measured(), Path({str(path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_what_is_called_exact_is_exact(fresh):
    off = {row["model"]: (row["worst"], row["error"]) for row in fresh if row["error"] and float(row["error"]) > 1e-5}
    assert not off


@pytest.mark.slow
def test_the_committed_table_is_of_this_code(fresh):
    """All but the errors' last digits, and where it was measured."""
    committed = coverage.read()
    assert [row["model"] for row in fresh] == [row["model"] for row in committed]
    for new, old in zip(fresh, committed, strict=True):
        counted = [name for name in coverage.COLUMNS if name not in MEASURED]
        assert [new[name] for name in counted] == [old[name] for name in counted], "make coverage"


def test_the_page_shows_what_the_csv_holds():
    text = coverage.PAGE.read_text(encoding="utf-8")
    assert text == coverage.rendered(text, coverage.read()), "python -m benchmarks.coverage --render"


def test_a_page_without_the_markers_is_not_written_over():
    with pytest.raises(SystemExit, match="does not have the lines"):
        coverage.rendered("# Coverage\n", coverage.read())

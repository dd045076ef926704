"""A race's files: rows as they come, runs that are done are skipped, those that were cut are raced again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.commands import CommandError
from gradwire.tools.race import plot, race_runner
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.race_files import RaceFiles
from gradwire.tools.result_files import read

RUN = RaceRun("digits", 4, "10", "vgc:alpha=1.5,zeta=0.99", 0, 0.97, limit_s=60, limit_steps=500)
OTHER = replace(RUN, rate="100", method="python:somebody.topk")
ORIGIN = {"commit": "abc"}


def standing(step=10, state="", **figures):
    fixed = {
        "seconds": step / 8,
        "step": step,
        "score": 0.9,
        "bytes_sent": 100 * step,
        "interface_bytes": None,
        "waited": None,
    }
    return {**fixed, "state": state, **figures}


class Seen:
    def __init__(self):
        self.shown = []

    def show(self, run, state, figures=None):
        self.shown.append((run.method, state))


def test_rows_are_what_was_told(tmp_path):
    files = RaceFiles(tmp_path / "new" / "folder")
    assert files.find(RUN) is None
    files.begin(RUN)
    files.test(RUN, standing(5))
    files.test(RUN, standing(10, "reached", seconds=1 / 3))
    row = files.end(RUN, standing(10, "reached", seconds=1 / 3), ORIGIN)
    assert read(files.results) == [row]
    assert (row["method"], row["seconds"], row["step"], row["interface_bytes"]) == (
        RUN.method,
        "0.3333333333",
        "10",
        "",
    )
    assert (row["state"], row["limit_steps"], row["commit"]) == ("reached", "500", "abc")
    assert [test["step"] for test in files.traced(RUN)] == ["5", "10"]
    assert files.find(RUN) == row
    assert files.find(replace(RUN, limit_s=1e6)) == row  # reached is reached
    assert files.find(replace(RUN, seed=1)) is None
    assert files.rows([OTHER, RUN]) == [(RUN, row)]


def test_what_did_not_reach_is_done_only_within_its_limits(tmp_path):
    files = RaceFiles(tmp_path)
    files.begin(RUN)
    files.end(RUN, standing(500, "did not reach"), ORIGIN)
    assert files.find(RUN) is not None
    assert files.find(replace(RUN, limit_steps=100)) is not None
    assert files.find(replace(RUN, limit_steps=501)) is None
    assert files.find(replace(RUN, limit_s=61)) is None


def test_what_a_cut_run_has_left_goes_away_and_nothing_else(tmp_path):
    files = RaceFiles(tmp_path)
    for run in (OTHER, RUN):
        files.begin(run)
        files.test(run, standing(5))
    with files.results.open("a") as file:  # the machine stopped in the middle of a row
        file.write("task,hosts,rate\ndigits,4\n")
    assert files.find(RUN) is None
    files.begin(RUN)
    assert files.traced(RUN) == []
    assert [test["step"] for test in files.traced(OTHER)] == ["5"]


def test_a_file_in_place_of_the_folder(tmp_path):
    path = tmp_path / "race"
    path.write_text("")
    with pytest.raises(InputError, match="is a file, a folder was expected"):
        RaceFiles(path)


def test_done_runs_are_skipped_and_failures_do_not_end_the_race(tmp_path, monkeypatch):
    files, seen, raced = RaceFiles(tmp_path), Seen(), []
    files.begin(RUN)
    files.end(RUN, standing(10, "reached"), ORIGIN)
    third = replace(RUN, method="dense")

    def race_one(run, *rest):
        raced.append(run)
        if run is OTHER:
            raise CommandError("host 1 failed", 7)

    monkeypatch.setattr(race_runner, "race_one", race_one)
    assert race_runner.race([RUN, OTHER, third], files, seen) == ["python:somebody.topk at 100: host 1 failed"]
    assert raced == [OTHER, third]
    assert seen.shown == [(RUN.method, "reached"), (OTHER.method, "failed")]


def test_the_picture_has_every_rate_and_method(tmp_path):
    pytest.importorskip("matplotlib")
    files, path = RaceFiles(tmp_path), tmp_path / "race.svg"
    assert plot.draw([RUN], files, path) == "nothing to draw"
    for run, state in ((RUN, "reached"), (OTHER, "did not reach")):
        files.begin(run)
        for step in (5, 10):
            files.test(run, standing(step))
        files.end(run, standing(10, state), ORIGIN)
    assert plot.draw([RUN, OTHER], files, path) == ""
    text = path.read_text(encoding="utf-8")
    assert all(
        words in text for words in ("10 Mbit/s", "100 Mbit/s", RUN.method, OTHER.method, "did not reach", "1.2 s")
    )

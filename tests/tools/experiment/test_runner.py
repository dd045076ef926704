"""Runs of an experiment: rows as they come, skipped when done, going on where they were cut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradwire.tools.cli import app
from gradwire.tools.experiment.experiment_file import Experiment, Run, from_table, open_task
from gradwire.tools.experiment.run_grid import Runner
from gradwire.tools.experiment.simulated_training import Row, SimulatedTraining
from gradwire.tools.result_files import read

TABLE: dict[str, Any] = {
    "task": "digits",
    "methods": ["dense", "vgc:alpha=1"],
    "epochs": 3,
    "workers": 2,
    "optimizers": ["adam"],
    "steps_per_epoch": 6,
}
VGC = "adam-vgc-alpha-1-seed0"
PLACES = ("seconds", "ms_a_step")  # differ from one run to the next


class Seen:
    def __init__(self) -> None:
        self.epochs: list[tuple[str, int]] = []
        self.skipped: list[str] = []

    def runs(self, runs: int, done: int) -> None:
        self.begun = (runs, done)

    def epoch(self, run: Run, number: int, row: Row) -> None:
        self.epochs.append((run.name, number))

    def skip(self, run: Run, why: str) -> None:
        self.skipped.append(run.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def runner(folder: Path, experiment: Experiment | None = None, **options: Any) -> tuple[Runner, Seen]:
    experiment, seen = experiment or from_table(TABLE), Seen()
    return Runner(experiment, open_task(experiment, None), torch.device("cpu"), folder, seen, **options), seen


def figures(path: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key not in PLACES} for row in read(path)]


def test_a_clipped_step_is_as_long_as_the_bound() -> None:
    change = {"optimizers": ["plain"], "learning_rate": {"plain": 2.0}, "weight_decay": 0.0, "steps_per_epoch": 1}
    lengths = []
    for clip in (0.0, 0.01):
        experiment = from_table(TABLE | change | {"clip": clip})
        virtual = SimulatedTraining(experiment, experiment.runs[0], open_task(experiment, None), torch.device("cpu"))
        before = torch.nn.utils.parameters_to_vector(virtual.model.parameters()).detach()
        virtual.epoch()
        after = torch.nn.utils.parameters_to_vector(virtual.model.parameters()).detach()
        lengths.append(float((after - before).norm()))
    assert lengths[0] > 0.5
    assert lengths[1] == pytest.approx(0.02, rel=1e-3)


def test_rows_layers_and_where_they_come_from(tmp_path: Path) -> None:
    run, seen = runner(tmp_path, command="gradwire experiment some.toml")
    assert run()
    assert seen.begun == (2, 0)
    assert [number for _, number in seen.epochs] == [1, 2, 3, 1, 2, 3]
    rows = read(tmp_path / f"{VGC}.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert rows[0]["command"] == "gradwire experiment some.toml"
    assert all(rows[0][name] for name in ("torch", "python", "hardware", "gradwire"))
    assert float(rows[2]["test_accuracy"]) > float(rows[0]["test_accuracy"]) > 0.2
    assert float(rows[2]["ratio"]) > 2
    layers = read(tmp_path / f"{VGC}.layers.csv")[2]
    sent = sum(float(count) for name, count in layers.items() if name != "epoch")
    assert sent == pytest.approx(85_002 / float(rows[2]["ratio"]), rel=1e-3)
    dense = read(tmp_path / "adam-dense-seed0.csv")
    assert {row["ratio"] for row in dense} == {"1"}
    assert not list(tmp_path.glob("*.pt"))


def test_what_is_done_is_skipped(tmp_path: Path) -> None:
    run, _ = runner(tmp_path)
    assert run(["dense"])
    again, seen = runner(tmp_path)
    assert again()
    assert seen.begun == (2, 3)
    assert seen.skipped == ["adam-dense-seed0"]
    assert [name for name, _ in seen.epochs] == [VGC] * 3


def test_some_runs_in_an_order_of_ones_own(tmp_path: Path) -> None:
    run, seen = runner(tmp_path)
    assert run(["vgc", "seed0"])
    assert [name for name, _ in seen.epochs] == [VGC] * 3 + ["adam-dense-seed0"] * 3


def test_a_run_that_another_process_has_is_left_to_it(tmp_path: Path) -> None:
    holds = f"""
import pathlib
from gradwire.tools.experiment.run_files import taken
with taken(pathlib.Path({str(tmp_path)!r}), {VGC!r}) as mine:
    print(mine, flush=True)
    input()
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holds], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        run, seen = runner(tmp_path)
        assert not run()
        assert seen.skipped == [VGC]
        assert [name for name, _ in seen.epochs] == ["adam-dense-seed0"] * 3
        other.kill()
    again, seen = runner(tmp_path)
    assert again(), "a process that is gone has nothing"
    assert seen.skipped == ["adam-dense-seed0"]


def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, _ = runner(tmp_path / "whole")
    assert whole(["vgc"])
    times = iter([0.0] * 3 + [61.0] * 99)  # the first epoch ends after a minute
    cut, _ = runner(tmp_path / "cut", minutes=1.0, clock=lambda: next(times))
    assert not cut(["vgc"])
    done = len(read(tmp_path / "cut" / f"{VGC}.csv"))
    assert 0 < done < 3
    assert (tmp_path / "cut" / f"{VGC}.pt").is_file()
    on, seen = runner(tmp_path / "cut")
    assert on(["vgc"])
    assert seen.epochs[0] == (VGC, done + 1)
    for end in (".csv", ".layers.csv"):
        assert figures(tmp_path / "cut" / f"{VGC}{end}") == figures(tmp_path / "whole" / f"{VGC}{end}")
    assert not list((tmp_path / "cut").glob("*.pt"))


LOCAL = TABLE | {"methods": ["topk:density=0.1,exact=true"], "every": [5], "delay": 2, "fragments": 2, "clip": 1.0}
TOPK = "adam-topk-density-0.1-exact-true-H5-fragments-2-delay-2-seed0"


def test_local_steps_go_on_bit_for_bit_and_end_with_a_round(tmp_path: Path) -> None:
    """Epochs of six steps are no whole rounds; the last one takes what was trained since."""
    experiment = from_table(LOCAL)
    whole, _ = runner(tmp_path / "whole", experiment)
    assert whole()
    times = iter([0.0] * 3 + [61.0] * 99)
    cut, _ = runner(tmp_path / "cut", experiment, minutes=1.0, clock=lambda: next(times))
    assert not cut()
    assert (tmp_path / "cut" / f"{TOPK}.pt").is_file()
    on, _ = runner(tmp_path / "cut", experiment)
    assert on()
    for end in (".csv", ".layers.csv"):
        assert figures(tmp_path / "cut" / f"{TOPK}{end}") == figures(tmp_path / "whole" / f"{TOPK}{end}")
    rows = read(tmp_path / "whole" / f"{TOPK}.csv")
    assert float(rows[2]["test_accuracy"]) > float(rows[0]["test_accuracy"])
    assert {float(row["dense_bytes_a_step"]) for row in rows} == {4 * 85_002}
    sent = [6 * float(row["bytes_a_step"]) for row in rows]
    kept = 8 * 0.1 * 85_002  # bytes of a round at most, but for heads
    assert sent[0] + sent[1] + sent[2] < 5 * kept  # three rounds, and at the end two halves of a fourth
    assert sum(sent) > 3 * 0.5 * kept


def test_local_steps_are_evaluated_at_the_base_weights() -> None:
    table = LOCAL | {"every": [100], "delay": 0, "optimizers": ["plain"], "learning_rate": {"plain": 0.1}}
    experiment = from_table(table)
    virtual = SimulatedTraining(experiment, experiment.runs[0], open_task(experiment, None), torch.device("cpu"))
    start = virtual.evaluate()
    rows = [virtual.epoch()[0] for _ in range(3)]
    assert [row["test_accuracy"] for row in rows[:2]] == [start["test_accuracy"]] * 2
    assert rows[0]["train_loss"] > rows[1]["train_loss"]
    assert (rows[0]["bytes_a_step"], rows[0]["ratio"]) == (0, float("inf"))
    assert rows[2]["test_accuracy"] != start["test_accuracy"]  # after the last round
    assert rows[2]["bytes_a_step"] > 0


def test_rows_later_than_the_last_save_are_dropped(tmp_path: Path) -> None:
    """Killed after an epoch that was written down and not saved."""
    run, _ = runner(tmp_path, save_every=1e-9)
    watch = run.watcher.epoch

    def killed(which: Run, number: int, row: Row) -> None:
        watch(which, number, row)
        if number == 2:
            raise KeyboardInterrupt

    run.watcher.epoch = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(["vgc"])
    assert len(read(tmp_path / f"{VGC}.csv")) == 2
    on, seen = runner(tmp_path)
    assert on(["vgc"])
    assert [number for _, number in seen.epochs] == [2, 3]
    assert [row["epoch"] for row in read(tmp_path / f"{VGC}.csv")] == ["1", "2", "3"]


def test_without_its_state_a_run_starts_anew(tmp_path: Path) -> None:
    times = iter([0.0] * 3 + [61.0] * 99)
    cut, _ = runner(tmp_path, minutes=1.0, clock=lambda: next(times))
    assert not cut(["vgc"])
    (tmp_path / f"{VGC}.pt").unlink()
    on, seen = runner(tmp_path)
    assert on(["vgc"])
    assert [number for _, number in seen.epochs] == [1, 2, 3]
    assert [row["epoch"] for row in read(tmp_path / f"{VGC}.csv")] == ["1", "2", "3"]


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('task = "digits"\nmethods = ["topk:density=0.1"]\nepochs = 2\nworkers = 2\nsteps_per_epoch = 3\n')
    result = CliRunner().invoke(app, ["experiment", str(file), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "sgd-topk-density-0.1-seed0  epoch 2/2" in result.output
    rows = read(tmp_path / "results" / "small" / "sgd-topk-density-0.1-seed0.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert rows[0]["command"] == "gradwire experiment small.toml"
    again = CliRunner().invoke(app, ["experiment", str(file), "--device", "cpu"])
    assert "is done" in again.output


def test_bad_input_on_the_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["experiment", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "is no file" in result.output

"""`gradwire train` as a user runs it: real processes, the files it leaves, its errors, torchrun, resume."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TIMEOUT_S, clean_environment, run_command
from typer.testing import CliRunner

import gradwire
from gradwire.tools.cli import app

pytestmark = pytest.mark.slow

OPTIONS = ("train", "--task", "digits", "--compressor", "vgc:alpha=1.5", "--epochs", "2", "--seed", "5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two epochs on two workers, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    result = run_command(*OPTIONS, "--workers", "2", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "nothing is written to standard error when all goes well"
    return out, result.stdout


def read_rows(out: Path) -> list[dict[str, float]]:
    with (out / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_metrics(finished: tuple[Path, str]) -> None:
    out, printed = finished
    rows = read_rows(out)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["step"] for row in rows] == [44, 88]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    assert 0.5 < rows[1]["test_accuracy"] <= 1
    for row in rows:
        assert 0 < row["bytes_sent"] < row["dense_bytes"] == 44 * 4 * 85_002
        assert 1 < row["ratio"] < 10_000
        assert row["bits_per_parameter"] == pytest.approx(8 * row["bytes_sent"] / (44 * 85_002), rel=1e-6)
        assert row["seconds"] == pytest.approx(44 * row["ms_per_step"] / 1000, rel=1e-6)
    assert printed.count("epoch 1/2") == printed.count("epoch 2/2") == 1, "rank 0 alone speaks"


def test_summary(finished: tuple[Path, str]) -> None:
    out, _ = finished
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert summary["command"].startswith("gradwire train --task digits --compressor vgc:alpha=1.5")
    assert summary["finished"] is True
    assert (summary["seed"], summary["workers"], summary["parameters"]) == (5, 2, 85_002)
    assert summary["compressor"].startswith("VGC(alpha=1.5")
    assert set(summary["versions"]) == {"gradwire", "torch", "numpy", "python"}
    assert summary["total"]["bytes_sent"] == sum(row["bytes_sent"] for row in read_rows(out))
    assert summary["total"]["steps"] == 88


def test_a_finished_run_is_not_run_again(finished: tuple[Path, str]) -> None:
    out, _ = finished
    again = run_command(*OPTIONS, "--workers", "2", "--out", str(out), "--resume")
    assert again.returncode == 0
    assert "has finished its 2 epochs" in again.stdout
    refused = run_command(*OPTIONS, "--workers", "2", "--out", str(out))
    assert refused.returncode == 2
    assert refused.stderr.startswith("gradwire: error:")
    assert "already holds a run" in refused.stderr


def test_bad_input_is_one_line_and_exit_2() -> None:
    result = run_command("train", "--compressor", "zip")
    assert result.returncode == 2
    assert result.stderr.startswith("gradwire: error: --compressor zip: unknown compressor 'zip'; known: dense, bf16, ")
    assert result.stderr.count("\n") == 1


def test_torchrun_runs_the_same_program(tmp_path: Path, text_file: Path) -> None:
    """The text task, so that a transformer goes over the wire as well; torchrun decides the number of workers."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "gradwire", "train", "--task", "text", "--data", str(text_file), "--out", str(tmp_path / "out")]
    command = [*torchrun, *train, "--steps-per-epoch", "3", "--epochs", "2", "--batch", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment())
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "out")
    assert [(row["step"], row["workers"]) for row in rows] == [(3, 2), (6, 2)]
    assert rows[1]["bits_per_byte"] < rows[0]["bits_per_byte"] < 8.5


BREAK_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from gradwire.tools.train.loop import Trainer
    take_step = Trainer.take_step
    def broken(self, indices):
        if self.state.step == 3:
            raise ArithmeticError("broken on purpose")
        return take_step(self, indices)
    Trainer.take_step = broken
"""


def test_a_workers_error_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAK_RANK_1)
    out = str(tmp_path / "out")
    result = run_command(*OPTIONS, "--workers", "2", "--out", out, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("gradwire: worker 1 failed: ArithmeticError: broken on purpose\n")
    assert result.stderr.count("ArithmeticError: broken on purpose") == 2, "the message, and its traceback's last line"
    assert len(result.stderr.splitlines()) < 20


SLEEP_IN_RANK_1 = BREAK_RANK_1.replace('raise ArithmeticError("broken on purpose")', "__import__('time').sleep(60)")


def test_a_worker_that_does_not_come_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLEEP_IN_RANK_1)
    begin = time.monotonic()
    out = ("--workers", "2", "--timeout", "4", "--out", str(tmp_path / "out"))
    result = run_command(*OPTIONS, *out, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert result.returncode == 1
    assert "4000ms" in result.stderr
    assert time.monotonic() - begin < 55, "it does not wait for the one that sleeps"


def test_what_a_user_can_mend_has_no_traceback_of_ours_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "gradwire", "train", "--compressor", "zip"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment())
    assert result.returncode == 1
    assert "traceback : error: --compressor zip: unknown compressor 'zip'" in result.stderr
    assert "gradwire/tools/train/" not in result.stderr


def test_the_version_is_said() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"gradwire {gradwire.__version__}, torch {torch.__version__}, Python 3.")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What it wrote and printed: 3 real workers, real data, the same number of epochs for every method."""
    path = tmp_path_factory.mktemp("demo") / "demo.csv"
    result = run_command("demo", "--epochs", "6", "--workers", "3", "--csv", str(path))
    assert result.returncode == 0, result.stderr
    return path, result.stdout


def test_vgc_reaches_the_accuracy_of_dense_on_digits(demo: tuple[Path, str]) -> None:
    _, printed = demo
    rows = {name: re.search(rf"{name}[^%]* ([\d.]+) %.*? ([\d.]+) x", printed) for name in ("Dense", "VGC alpha=1 ")}
    (dense, _), (vgc, less) = ((float(row[1]), float(row[2])) for row in rows.values() if row)
    assert dense > 96
    assert vgc >= dense - 1
    assert less > 4  # and it sent much less


def test_demo_prints_one_table_and_writes_it(demo: tuple[Path, str]) -> None:
    path, printed = demo
    heading = next(line for line in printed.splitlines() if "method" in line)
    assert all(name in heading for name in ("test accuracy", "MB sent", "times less", "ratio", "ms/step"))
    for name in ("Dense (float32)", "BF16", "VGC alpha=1 ", "VGC alpha=1.5"):
        assert printed.count(name) == 1, name
    dense, bf16 = (next(line for line in printed.splitlines() if name in line) for name in ("Dense (", "BF16 "))
    steps = 6 * 29
    assert f"{steps * 4 * 85_002 / 1e6:.2f}" in dense, "float32"
    assert f"{steps * 2 * 85_002 / 1e6:.2f}" in bf16
    assert "2.0 x" in bf16
    with path.open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["Dense (float32)", "BF16", "VGC alpha=1", "VGC alpha=1.5"]
    assert rows["BF16"]["bytes_sent"] == str(steps * 2 * 85_002)
    assert {(row["workers"], row["epochs"], row["seed"]) for row in rows.values()} == {("3", "6", "0")}
    assert rows["BF16"]["command"] == f"gradwire demo --epochs 6 --workers 3 --csv {path}"


def test_a_csv_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "demo.csv", "make it first")):
        result = CliRunner().invoke(app, ["demo", "--csv", str(path)])
        assert result.exit_code == 2
        assert message in result.stderr

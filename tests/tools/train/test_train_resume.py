"""Killed at any point and gone on with = never interrupted, bit for bit; and on another number of workers."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TIMEOUT_S, children, clean_environment, run_command

from gradwire.tools.input_errors import InputError
from gradwire.tools.train.run_directory import take_lock

pytestmark = pytest.mark.slow

EPOCHS = 4
OPTIONS = ("train", "--task", "digits", "--optimizer", "adam", "--save-every", "8", "--seed", "1")


def options(compressor: str, out: Path, workers: int = 2) -> list[str]:
    return [*OPTIONS, "--epochs", str(EPOCHS), "--compressor", compressor, "--out", str(out), "--workers", str(workers)]


def latest(out: Path) -> Path | None:
    pointer = out / "checkpoint" / "latest"
    return out / "checkpoint" / pointer.read_text().strip() if pointer.exists() else None


def load_training(out: Path) -> dict[str, Any]:
    folder = latest(out)
    assert folder is not None
    content: dict[str, Any] = torch.load(folder / "training.pt", weights_only=True)
    return content


def run_and_kill(arguments: list[str], out: Path, launcher_only: bool = False) -> None:
    """Start a run and kill it with SIGKILL once it is well inside its second epoch."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while (folder := latest(out)) is None or folder.name <= "epoch-00001-step-00000048":
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    for pid in [process.pid] if launcher_only else [process.pid, *children(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while True:
        try:
            os.close(take_lock(out))
            return
        except InputError:
            pass
        assert time.monotonic() < deadline, "a worker has survived its launcher"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of VGC on two workers, killed between two steps or in the middle of a save. Copy it before use."""
    out = tmp_path_factory.mktemp("killed") / "out"
    run_and_kill(options("vgc:alpha=1", out), out)
    return out


def test_vgc_goes_on_bit_for_bit_after_a_kill(killed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(killed, broken)
    go_on_and_compare("vgc:alpha=1", broken, tmp_path / "whole")


def go_on_and_compare(compressor: str, broken: Path, whole: Path) -> None:
    stopped = load_training(broken)["standing"]
    assert 48 < stopped["step"] < EPOCHS * 44, "killed in the middle"
    result = run_command(*options(compressor, broken), "--resume")
    assert result.returncode == 0, result.stderr
    assert f"going on after epoch {stopped['epoch']}, step {stopped['step']}" in result.stdout
    result = run_command(*options(compressor, whole))
    assert result.returncode == 0, result.stderr
    assert_same_training(load_training(whole), load_training(broken))
    columns = ("epoch", "step", "train_loss", "test_accuracy", "bytes_sent", "ratio")
    assert read_columns(whole, columns) == read_columns(broken, columns)


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["model"].keys() == other["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    for index, state in one["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, other["optimizer"]["state"][index][name]), (index, name)
    assert torch.equal(one["generators"], other["generators"])


def read_columns(out: Path, names: tuple[str, ...]) -> list[list[str]]:
    header, *lines = [line.split(",") for line in (out / "metrics.csv").read_text().splitlines()]
    return [[line[header.index(name)] for name in names] for line in lines]


def test_two_workers_become_three_in_the_middle_of_an_epoch(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    stopped = load_training(out)["standing"]
    result = run_command(*options("vgc:alpha=1", out, workers=3), "--resume")
    assert result.returncode == 0, result.stderr
    assert "the state of 2 workers is carried over to 3" in result.stdout
    rows = read_columns(out, ("epoch", "workers", "test_accuracy"))
    assert [row[0] for row in rows] == [str(epoch) for epoch in range(1, EPOCHS + 1)]
    assert [row[1] for row in rows] == ["2"] * stopped["epoch"] + ["3"] * (EPOCHS - stopped["epoch"])
    assert float(rows[-1][2]) > 0.9


def test_another_seed_is_refused(killed: Path) -> None:
    result = run_command(*options("vgc:alpha=1", killed), "--resume", "--seed", "2")
    assert result.returncode == 2
    assert "seed is 1 there and 2 here" in result.stderr

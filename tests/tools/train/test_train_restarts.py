"""One worker is killed, all are started again, and what comes out is what an uninterrupted run has, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import TIMEOUT_S, children, clean_environment, run_command
from test_train_resume import EPOCHS, assert_same_training, latest, load_training, options, read_columns

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
EXAMPLE = Path(__file__).parents[3] / "examples" / "restarts.py"
COLUMNS = ("epoch", "step", "train_loss", "test_accuracy", "bytes_sent", "ratio")


def run_and_kill_a_worker(arguments: list[str], ready: Callable[[], bool], **environment: str) -> str:
    """Run `python ...`, kill its worker 1 with SIGKILL when `ready()`; what it has printed when it has ended well."""
    settings = clean_environment(**environment)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *arguments], env=settings, text=True, start_new_session=True, **pipes)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not ready():
            assert process.poll() is None, "the run ended before a worker could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(worker_1(process.pid), signal.SIGKILL)
        said, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors
    return said


def worker_1(launcher: int) -> int:
    """The worker of rank 1, by what it finds in its environment."""
    (found,) = (pid for pid in children(launcher) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "out"
    result = run_command(*options("vgc:alpha=1", out))
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize("launcher", [("-m", "gradwire"), (*TORCHRUN, "-m", "gradwire")], ids=["train", "torchrun"])
def test_a_run_outlives_a_worker(whole: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Begun with --overwrite over a run that is there: it is overwritten once, and not again at the restart.

    torchrun is not told TORCH_DISABLE_SHARE_RDZV_TCP_STORE, without which plain Gloo does not come back.
    """
    out = tmp_path / "out"
    begun = run_command(*options("vgc:alpha=1", out), "--steps-per-epoch", "2")
    assert begun.returncode == 0, begun.stderr
    old = latest(out)

    def ready() -> bool:
        try:
            now = latest(out)
        except FileNotFoundError:  # just being overwritten
            now = None
        return now is not None and now != old and now.name > "epoch-00001-step-00000048"

    arguments = [*options("vgc:alpha=1", out), "--overwrite"]
    if launcher == ("-m", "gradwire"):
        arguments += ["--max-restarts", "1"]
    said = run_and_kill_a_worker([*launcher, *arguments], ready)
    assert "going on after epoch" in said
    assert_same_training(load_training(whole), load_training(out))
    assert read_columns(whole, COLUMNS) == read_columns(out, COLUMNS)
    assert len(read_columns(out, COLUMNS)) == EPOCHS


def test_a_run_that_is_killed_again_and_again_ends_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    out = tmp_path / "out"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = run_command(*options("dense", out), "--max-restarts", "1", PYTHONPATH=path)
    assert result.returncode == 1
    assert result.stderr.startswith("gradwire: worker 1 failed: ArithmeticError: broken in attempt 1\n")


BREAK = """
import os
if os.environ.get("RANK") == "1":
    from gradwire.tools.train.loop import Trainer
    def broken(self, indices):
        raise ArithmeticError("broken in attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])
    Trainer.take_step = broken
"""


def test_the_example_outlives_a_worker(tmp_path: Path) -> None:
    """A script of a user's own, as docs/restarts.md has it; the worker is killed while it saves."""
    told = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def ready() -> bool:
        folder = tmp_path / "killed"
        return (folder / "unfinished").exists() and any(path.name >= "step-000100" for path in folder.glob("step-*"))

    said = run_and_kill_a_worker([*TORCHRUN, str(EXAMPLE), str(tmp_path / "killed")], ready, **told)
    assert "attempt 0 begins after step 0" in said
    begun = int(said.split("attempt 1 begins after step ")[1].split()[0])
    assert 100 <= begun < 400
    command = [sys.executable, *TORCHRUN, str(EXAMPLE), str(tmp_path / "whole")]
    subprocess.run(command, env=clean_environment(**told), check=True, capture_output=True, timeout=TIMEOUT_S)
    one, other = (torch.load(tmp_path / name / "step-000400" / "training.pt") for name in ("killed", "whole"))
    for name, tensor in one["network"].items():
        assert torch.equal(tensor, other["network"][name]), name

"""Ctrl-C ends a command at once: no worker is left, one line says so, and a run goes on from its checkpoint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TIMEOUT_S, children, clean_environment, run_command

pytestmark = [pytest.mark.slow, pytest.mark.alone]

PROMPT_S = 10  # measured: 1 second; torchrun itself waits 30 for a worker that does not end
INTERRUPTED = "gradwire: interrupted. The same command with --resume goes on from the last checkpoint\n"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def options(out: Path, epochs: int) -> list[str]:
    return ["train", "--task", "digits", "--workers", "2", "--epochs", str(epochs), "--out", str(out)]


def interrupt(arguments: list[str], ready: Callable[[list[int]], bool]) -> str:
    """Run a command, send SIGINT to its process group as a terminal does when `ready(workers)`, return its stderr."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=clean_environment(), text=True, start_new_session=True, **pipes)
    deadline = time.monotonic() + TIMEOUT_S
    while len(workers := children(process.pid)) < 2 or not ready(workers):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - begin < PROMPT_S
    assert process.returncode == 130
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
    return errors


def test_a_run_ends_at_once_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pointer = out / "checkpoint" / "latest"
    assert interrupt(options(out, epochs=1000), lambda _: pointer.exists()) == INTERRUPTED
    epoch = int(pointer.read_text().split("-")[1])
    result = run_command(*options(out, epochs=epoch + 1), "--resume")
    assert result.returncode == 0, result.stderr
    assert f"going on after epoch {epoch}, step {44 * epoch}" in result.stdout
    assert (out / "metrics.csv").read_text().count("\n") == 1 + epoch + 1


def test_workers_that_still_import_torch_show_no_traceback(tmp_path: Path) -> None:
    """Long before they reach a line of gradwire: the first seconds are when a user sees a wrong option."""

    def importing(workers: list[int]) -> bool:
        return all("libtorch" in Path(f"/proc/{worker}/maps").read_text() for worker in workers)

    assert interrupt(options(tmp_path / "out", epochs=1000), importing) == INTERRUPTED


IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_the_key_on_a_terminal_gives_the_cursor_back() -> None:
    """A worker dies inside its progress bar, which hides the cursor. The demo has no --resume and names none."""
    command = [sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "gradwire", "demo", "--workers", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=clean_environment(TERM="xterm"), **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    before, after = b"", b""
    while b"epoch 1/12" not in before:
        before += (piece := os.read(process.stdout.fileno(), 4096))
        assert piece, before
    begin = time.monotonic()
    os.write(process.stdin.fileno(), b"\x03")
    while piece := os.read(process.stdout.fileno(), 4096):
        after += piece
    assert process.wait() == 130
    assert time.monotonic() - begin < PROMPT_S
    shown = (before + after).decode()
    assert HIDE_CURSOR in shown
    assert shown.endswith(f"^C\r\n{SHOW_CURSOR}gradwire: interrupted.\r\n")
    assert "Traceback" not in shown
    assert "terminate called" not in shown
    process.stdin.close()
    process.stdout.close()

"""Start the workers on this machine by torchrun's own machinery, and show the first worker's error once."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gradwire.train.team import LAUNCHER

TRACEBACK_LINES = 12

# `python -m gradwire` for a worker that Ctrl-C ends silently, also in the seconds in which it imports torch. Ctrl-C
# reaches every process of the terminal; Python would show a traceback for each, the launcher says it once.
BEGIN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import runpy; runpy.run_module('gradwire', run_name='__main__', alter_sys=True)"
)


class WorkerError(Exception):
    """A worker has failed; the message is its own error."""


def launch(workers: int, arguments: list[str]) -> None:
    """Run `gradwire <arguments>` in `workers` processes, as `torchrun --standalone -m gradwire <arguments>` does."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would warn and take 1
    os.environ[LAUNCHER] = str(os.getpid())
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the error is shown once, below
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc-per-node", str(workers), "--no-python", sys.executable, "-u", "-c", BEGIN]
    try:
        with tidy_terminal():
            torchrun.run(torchrun.parse_args([*options, *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        raise WorkerError(explain(error.failures)) from None
    except SignalException as error:
        raise KeyboardInterrupt if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval) from None


@contextmanager
def tidy_terminal() -> Iterator[None]:
    """A worker that is ended inside its progress bar leaves a line without an end and no cursor."""
    console = Console()
    try:
        yield
    except BaseException:
        if console.is_terminal:
            console.print()
        raise
    finally:
        console.show_cursor()


def explain(failures: dict[int, ProcessFailure]) -> str:
    """The failure that came first, in words. The others mostly say that the connection to that worker was lost."""
    rank = min(failures, key=lambda rank: when(failures[rank]))
    failure = failures[rank]
    message: Any = failure.message  # a dict where the worker could write its error, whatever its annotation says
    if not isinstance(message, dict):
        remedy = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        return f"worker {rank} died: {message}{remedy}"
    stack = message["extraInfo"]["py_callstack"].rstrip().splitlines()[-TRACEBACK_LINES:]
    return f"worker {rank} failed: {message['message']}\n" + "\n".join(f"    {line}" for line in stack)


def when(failure: ProcessFailure) -> float:
    """When a worker failed. One that a signal ended comes first: it could not write, and the others noticed it."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return 0.0
    message: Any = failure.message
    if isinstance(message, dict):
        return float(message["extraInfo"].get("time", failure.timestamp))
    return float(failure.timestamp) + 1  # stamped when it was noticed, in whole seconds

"""Start the workers on this machine by torchrun's own machinery, and show the first worker's error once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gradwire.tools.train.worker_group import LAUNCHER, STORE

TRACEBACK_LINES = 12
LOOPBACK = "lo"

# `python -m gradwire` for a worker that Ctrl-C ends silently, also in the seconds in which it imports torch. Ctrl-C
# reaches every process of the terminal; Python would show a traceback for each, the launcher says it once.
BEGIN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import runpy; runpy.run_module('gradwire', run_name='__main__', alter_sys=True)"
)


class WorkerError(Exception):
    """A worker has failed; the message is its own error."""


def launch(workers: int, arguments: list[str], max_restarts: int = 0) -> None:
    """Run `gradwire <arguments>` in `workers` processes, as `torchrun -m gradwire <arguments>` does.

    torchrun's own store would listen on every interface, and its agent unpickles what it finds there. Here the agent
    and its workers meet in files that nobody else may open, and the workers' sockets are the loopback's.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the error is shown once, below
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gradwire-") as private, tidy_terminal():  # of mode 700
        os.environ.update(environment(workers, private))
        meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{private}/agent"]
        counts = ["--nproc-per-node", str(workers), "--max-restarts", str(max_restarts)]
        program = ["--no-python", sys.executable, "-u", "-c", BEGIN, *arguments]
        try:
            torchrun.run(torchrun.parse_args([*meeting, *counts, *program]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            raise WorkerError(explain(error.failures)) from None
        except SignalException as error:
            raise KeyboardInterrupt if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval) from None


def environment(workers: int, private: str) -> dict[str, str]:
    """What the workers find in their environment beside torchrun's own variables."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),  # torchrun would warn and take 1
        LAUNCHER: str(os.getpid()),
        STORE: private,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the agent would open a store of its own for the workers
    }


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
    text, stack = str(message["message"]), str(message["extraInfo"]["py_callstack"]).rstrip()
    if stack == text:  # what the user can mend: there is nothing to trace
        return text
    lines = (f"    {line}" for line in stack.splitlines()[-TRACEBACK_LINES:])
    return f"worker {rank} failed: {text}\n" + "\n".join(lines)


def when(failure: ProcessFailure) -> float:
    """When a worker failed. One that a signal ended comes first: it could not write, and the others noticed it."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return 0.0
    message: Any = failure.message
    if isinstance(message, dict):
        return float(message["extraInfo"].get("time", failure.timestamp))
    return float(failure.timestamp) + 1  # stamped when it was noticed, in whole seconds

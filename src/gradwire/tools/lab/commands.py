"""One command on every host of a lab, as torchrun would start it on as many machines, watched until all have ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import Link
from gradwire.tools.train.launch import explain, when
from gradwire.tools.train.worker_process import ERROR_FILE

LOOK_S = 0.02  # between two looks at the processes
GRACE_S = 5.0  # from SIGTERM to SIGKILL
LAST_LINES = 20
OUTPUT, ERROR = "output", "error"  # files of each host: what it prints, and the error that a worker leaves for torchrun
PORT = 29500  # a lab's ports are all free


class CommandError(Exception):
    """A command has failed; `code` is what its shell would have said."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Change:
    """So many seconds after the start, each host's link gets a new rate."""

    after_s: float
    links: list[Link]


def run(hosts: Hosts, command: Sequence[str], look: Callable[[], None] = lambda: None) -> None:
    """Run a command once a host, to the end of all. The first that fails ends the others and is a CommandError.

    look: called again and again meanwhile, and once when all have ended.
    Host 0's output goes where ours goes; that of the others to files, and from there into the error.
    """
    program = [find_program(command), *command[1:]]
    with tempfile.TemporaryDirectory(prefix="gradwire-lab-") as private, hosts.meeting() as meeting:
        folder = Path(private)
        running: list[subprocess.Popen[Any]] = []
        try:
            for host in range(len(hosts)):
                log = None if host == 0 else (folder / f"{OUTPUT}-{host}").open("wb")
                env = {**environment(hosts, host), **meeting, ERROR_FILE: str(folder / f"{ERROR}-{host}")}
                running.append(hosts.start(host, program, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
                if log is not None:
                    log.close()
            watch(running, folder, look)
        finally:
            stop(running)


def environment(hosts: Hosts, host: int, port: int = PORT) -> dict[str, str]:
    """What torchrun would set on a machine with one worker, and a fair part of this machine's cores."""
    threads = str(max(1, (os.cpu_count() or 1) // len(hosts)))
    ours = {
        "RANK": str(host),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "PYTHONUNBUFFERED": "1",  # what a process has printed is seen, however it ends
        "PATH": search_path(),
    }
    defaults = {
        "OMP_NUM_THREADS": threads,
        # a program that counts cores takes all of them, on every host, whatever the line above says. 4 hosts of
        # `gradwire train` on 2 cores: 700 ms a step without this line, 15 with it
        "OMP_THREAD_LIMIT": os.environ.get("OMP_NUM_THREADS", threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that addresses have no names here
    }
    return ours | {name: value for name, value in defaults.items() if name not in os.environ}


def search_path() -> str:
    """PATH, and behind it the folder of this Python: `gradwire` is found though its environment is not activated."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def find_program(command: Sequence[str]) -> str:
    """Where the command is, so that a wrong name is an error before anything starts."""
    if not command:
        raise InputError("no command: give one after --, as in `gradwire lab --hosts 4 --rate 100 -- gradwire train`")
    found = shutil.which(command[0], path=search_path())
    if found is None:
        raise InputError(f"there is no command {command[0]!r}")
    return str(Path(found).absolute())


def watch(running: list[subprocess.Popen[Any]], folder: Path, look: Callable[[], None]) -> None:
    """Until all have ended well."""
    while True:
        codes = [process.poll() for process in running]
        look()
        if failed := [host for host, code in enumerate(codes) if code]:
            raise failure(failed, running, folder)
        if None not in codes:
            return
        time.sleep(LOOK_S)


def at_their_times(hosts: Hosts, changes: Sequence[Change]) -> Callable[[], None]:
    """For `run` to look: makes each change when it is due, counted from now."""
    begin = time.monotonic()
    left = sorted(changes, key=lambda change: change.after_s)

    def look() -> None:
        if left and time.monotonic() - begin >= left[0].after_s:
            for host, link in enumerate(left.pop(0).links):
                hosts.set_rate(host, link)

    return look


def failure(failed: list[int], running: list[subprocess.Popen[Any]], folder: Path) -> CommandError:
    """The failure that came first, in words: the program's own where it has left them for torchrun."""
    found = {
        host: ProcessFailure(host, running[host].pid, running[host].returncode, str(folder / f"{ERROR}-{host}"))
        for host in failed
    }
    host = min(found, key=lambda host: when(found[host]))
    code = found[host].exitcode
    exit_code = code if code > 0 else 128 - code
    if isinstance(found[host].message, dict):
        return CommandError(explain({host: found[host]}), exit_code)
    ended = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    if host == 0:
        return CommandError(f"host 0 {ended}", exit_code)  # its output has been seen
    output = (folder / f"{OUTPUT}-{host}").read_text(encoding="utf-8", errors="replace")
    lines = output.rstrip().splitlines()[-LAST_LINES:]
    said = "; its last lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else ", without a word"
    return CommandError(f"host {host} {ended}{said}", exit_code)


def stop(running: list[subprocess.Popen[Any]]) -> None:
    """End what still runs, kindly first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

"""What the hosts of a lab tell while they run: host 0 writes lines of JSON to a file, read as they come."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab, missing
from gradwire.tools.lab.commands import run
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import Rates

Event = dict[str, Any]
LOOK_S = 0.05


def check_lab(loopback: bool) -> None:
    """Raise where no lab can be built."""
    if not loopback and (lacking := missing()):
        raise InputError(
            f"shaped links need {lacking}. Without it, --loopback runs the same processes on 127.0.0.1, unshaped"
        )


def open_hosts(hosts: int, rate: Rates, loopback: bool) -> Hosts:
    """Hosts behind links of a rate, or processes on 127.0.0.1."""
    return Hosts(hosts) if loopback else Lab(hosts, rate)


def watch(hosts: Hosts, module: str, settings: dict[str, Any], tell: Callable[[Event], None]) -> None:
    """Run `python -m module SETTINGS FILE` on every host, to the end of all; `tell` gets what host 0 writes to FILE."""
    with tempfile.TemporaryDirectory(prefix="gradwire-race-") as folder:
        path = Path(folder) / "events"
        path.touch()
        reader = Reader(path, tell)
        reader.start()
        try:
            run(hosts, [sys.executable, "-m", module, json.dumps(settings), str(path)])
        finally:
            reader.stop()
        if reader.error is not None:
            raise reader.error


class Reader(threading.Thread):
    """Reads lines as they are written; the main thread is busy with the processes, and with Ctrl-C."""

    def __init__(self, path: Path, tell: Callable[[Event], None]) -> None:
        super().__init__(name="gradwire-events", daemon=True)
        self._path, self._tell, self._ended = path, tell, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self._path.open(encoding="utf-8") as file:
                rest = ""
                while True:
                    last = self._ended.is_set()  # asked before reading: what was written before the end is read
                    *lines, rest = (rest + file.read()).split("\n")
                    for line in lines:
                        self._tell(json.loads(line))
                    if last:
                        return
                    self._ended.wait(LOOK_S)
        except Exception as error:  # a full disk: the caller's to raise
            self.error = error

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Teller:
    """Host 0's end of it; the others say nothing."""

    def __init__(self, path: str, rank: int) -> None:
        self._file = open(path, "a", encoding="utf-8") if rank == 0 else None  # noqa: SIM115 until the process ends

    def __call__(self, event: Event) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()


def arguments(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """SETTINGS and FILE of a host's command line."""
    settings: dict[str, Any] = json.loads(argv[1])
    return settings, argv[2]

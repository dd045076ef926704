"""What the hosts of a lab tell while they run: host 0 writes lines of JSON to a file, read as they come."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab, missing
from gradwire.tools.lab.commands import run
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import Rates

Event = dict[str, Any]
Teller = Callable[[Event], None]


def check_lab(loopback: bool) -> None:
    """Raise where no lab can be built."""
    if not loopback and (lacking := missing()):
        raise InputError(
            f"shaped links need {lacking}. Without it, --loopback runs the same processes on 127.0.0.1, unshaped"
        )


def open_hosts(hosts: int, rate: Rates, loopback: bool) -> Hosts:
    """Hosts behind links of a rate, or processes on 127.0.0.1."""
    return Hosts(hosts) if loopback else Lab(hosts, rate)


def watch(hosts: Hosts, module: str, settings: dict[str, Any], tell: Teller) -> None:
    """Run `python -m module SETTINGS FILE` on every host, to the end of all; `tell` gets what host 0 writes to FILE."""
    with tempfile.TemporaryDirectory(prefix="gradwire-race-") as folder:
        path = Path(folder) / "events"
        path.touch()
        with path.open(encoding="utf-8") as file:
            unfinished = ""

            def look() -> None:
                nonlocal unfinished
                *lines, unfinished = (unfinished + file.read()).split("\n")
                for line in lines:
                    tell(json.loads(line))

            run(hosts, [sys.executable, "-m", module, json.dumps(settings), str(path)], look=look)


def teller(path: str, rank: int) -> Teller:
    """Host 0's end of it; the others say nothing."""
    if rank != 0:
        return lambda event: None
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 until the process ends
    return lambda event: print(json.dumps(event), file=file)

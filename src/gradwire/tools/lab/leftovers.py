"""Network namespaces of labs: their names, and how they go away with all that runs in them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from gradwire.tools.lab.iproute import LabError, call

FOLDER = Path("/run/netns")  # where `ip netns` keeps the names
NAME = re.compile(r"gradwire-(\d+)-\d+(-bridge)?")  # the first number: the process whose lab it is
KILLED_S = 5.0  # a process that takes longer to die waits for a disk: its namespace ends with it

in_use: set[str] = set()  # names of this process's own labs


def clean() -> list[str]:
    """Remove the namespaces of labs whose process is gone (SIGKILL leaves them), and return their names."""
    names = sorted(path.name for path in FOLDER.glob("gradwire-*") if is_left_over(path.name))
    remove(names)
    return names


def is_left_over(name: str) -> bool:
    """Whether the process that made a namespace is gone. One with our own number that we do not know is older."""
    match = NAME.fullmatch(name)
    if match is None:
        return False
    pid = int(match[1])
    return name not in in_use if pid == os.getpid() else not runs(pid)


def runs(pid: int) -> bool:
    """Whether there is such a process; a zombie's work is over."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def remove(names: Iterable[str]) -> None:
    """Kill what runs in these namespaces and delete them. Those that are gone already are none of our business."""
    present = [name for name in names if (FOLDER / name).exists()]
    deadline = time.monotonic() + KILLED_S
    while kill(present) and time.monotonic() < deadline:  # again: what has been killed may have started another
        time.sleep(0.01)
    for name in present:
        try:
            call("ip", "netns", "delete", name)
        except LabError:
            if (FOLDER / name).exists():  # otherwise another process has cleaned up at the same time
                raise


def kill(names: Iterable[str]) -> int:
    """Kill every process in these namespaces, and return how many there were."""
    pids = []
    for name in names:
        with contextlib.suppress(LabError):
            pids += call("ip", "netns", "pids", name).split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return len(pids)

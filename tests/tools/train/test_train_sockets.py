"""Who can reach what the launcher has started: nothing listens but on the loopback, and files are for their owner."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import TIMEOUT_S, children, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss (iproute2)")]

TRAIN = ("train", "--task", "digits", "--device", "cpu", "--epochs", "1000")
LAB = ("lab", "--loopback", "--hosts", "2", "--")
SCRIPT = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
for _ in range(10_000):
    dist.all_reduce(ones)
    time.sleep(0.1)
    print("going on", flush=True)
"""


@contextmanager
def running(*arguments: str, word: str, **environment: str) -> Iterator[int]:
    """`gradwire ...` until the block ends; it begins when `word` has been printed, so that all have met."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    settings = clean_environment(**environment)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=settings)
    assert process.stdout is not None
    try:
        assert word in process.stdout.readline()
        yield process.pid
    finally:
        pids = family(process.pid)
        process.terminate()
        process.wait(timeout=TIMEOUT_S)
        process.stdout.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def family(pid: int) -> set[int]:
    """A process and all that it has started."""
    return {pid}.union(*(family(child) for child in children(pid)))


def listening(pids: set[int]) -> list[str]:
    """The addresses that these processes listen on, of any kind."""
    shown = subprocess.run(["ss", "-H", "-lntup"], capture_output=True, text=True, check=True).stdout
    return [line.split()[4] for line in shown.splitlines() if any(f"pid={pid}," in line for pid in pids)]


def outside(addresses: list[str]) -> list[str]:
    return [address for address in addresses if address.rpartition(":")[0] not in ("127.0.0.1", "[::1]")]


@pytest.mark.parametrize(
    "arguments",
    [(*TRAIN, "--workers", "2", "--max-restarts", "1"), (*LAB, "gradwire", *TRAIN)],
    ids=["train", "lab"],
)
def test_nothing_listens_but_on_the_loopback(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Gloo's own sockets too, also for somebody who has exported an interface for other jobs.

    Where the workers of `gradwire train` meet is for their owner alone: torchrun's agent unpickles what it finds there.
    """
    exported = {"GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(tmp_path)}
    with running(*arguments, "--out", str(tmp_path / "out"), word="epoch 1", **exported) as pid:
        pids = family(pid)
        assert len(pids) >= 3
        addresses = listening(pids)
        assert addresses, "Gloo listens somewhere"
        assert outside(addresses) == []
        (folder,) = tmp_path.glob("gradwire-*")
        found = folder.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.getuid())
        if arguments[0] == "train":
            assert {path.name for path in folder.iterdir()} == {"agent", "workers-0"}
    assert list(tmp_path.glob("gradwire-*")) == []


def test_nor_does_a_users_script_in_a_lab_on_the_loopback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with running(*LAB, sys.executable, str(tmp_path / "script.py"), word="going on") as pid:
        addresses = listening(family(pid))
        assert addresses
        assert outside(addresses) == []

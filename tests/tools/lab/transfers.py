"""What the tests of labs share: when they can run, and TCP transfers between hosts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gradwire.tools.lab import Lab, missing

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=f"a lab needs {missing()}")

SEGMENT, FRAME, ACKNOWLEDGEMENT = 1448, 1514, 66  # bytes: what a full packet carries, its size, and that of its answer
PAYLOAD = SEGMENT / FRAME  # of a link's rate in one direction
PAYLOAD_BOTH_WAYS = SEGMENT / (FRAME + ACKNOWLEDGEMENT / 2)  # every other packet is acknowledged on the way back
PORT = 5000

RECEIVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
while connection.recv(1 << 18):
    pass
"""
# From before the connection until the receiver has all: never faster than the link, whoever had to wait for a core.
SEND = """
import socket, sys, time
n_bytes = left = int(sys.argv[3])
begin = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while left > 0:
        left -= connection.send(bytes(min(left, 1 << 16)))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(n_bytes * 8e-6 / (time.monotonic() - begin))
"""


def python(script: str, *arguments: object) -> list[str]:
    """The command of a script; -S: without site-packages it starts at once."""
    return [sys.executable, "-S", "-c", script, *map(str, arguments)]


def begin(lab: Lab, sender: int, receiver: int, n_bytes: int, port: int = PORT) -> subprocess.Popen[str]:
    """Start a transfer; its process prints the Mbit/s of payload."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    listening = lab.start(receiver, python(RECEIVE, port), **pipes)
    assert listening.stdout.readline() == "ready\n"
    return lab.start(sender, python(SEND, lab.address(receiver), port, n_bytes), **pipes)


def transfer(lab: Lab, ways: Sequence[tuple[int, int]], n_bytes: int) -> list[float]:
    """Mbit/s of payload, of transfers at the same time, each from a sender to a receiver."""
    running = [begin(lab, *way, n_bytes, PORT + number) for number, way in enumerate(ways)]
    return [float(process.communicate(timeout=60)[0]) for process in running]


def reached(lab: Lab, ways: Sequence[tuple[int, int]], n_bytes: int, least: float) -> list[float]:
    """The transfers' Mbit/s; once more, up to three times, where a machine with other work was late to send or read."""
    for _ in range(2):
        speeds = transfer(lab, ways, n_bytes)
        if min(speeds) >= least:
            return speeds
    return transfer(lab, ways, n_bytes)


def seconds(lab: Lab, sender: int, receiver: int, n_bytes: int) -> float:
    """How long one transfer takes, by our own clock."""
    started = time.monotonic()
    transfer(lab, [(sender, receiver)], n_bytes)
    return time.monotonic() - started

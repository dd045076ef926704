"""What `stats()` says was sent is what went over the interface, apart from the headers of TCP, IP and Ethernet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transfers import needs_namespaces

from gradwire.tools.lab import Counters, Lab
from gradwire.tools.lab.commands import environment

pytestmark = [needs_namespaces, pytest.mark.alone]

SCRIPT = Path(__file__).parent / "exchanged.py"
FRAMING = 1.10  # 66 bytes of headers for 1448 of payload, and 66 to acknowledge two such packets that came: 1.07
FIXED = 20_000  # bytes: two barriers, and the head that Gloo puts before each of a few dozen messages


def point(lab: Lab, running: list[subprocess.Popen[str]]) -> tuple[list[str], list[Counters]]:
    """What every host says, and its counters, while all wait."""
    said = [process.stdout.readline() for process in running]
    counted = [lab.counters(host) for host in range(len(lab))]
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    return said, counted


def exchange(hosts: int, methods: list[str]) -> dict[str, list[tuple[Counters, dict[str, Any]]]]:
    """By method and host: what its interface counted and what its `stats()` say, between the same two points."""
    found = {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, str(SCRIPT), *methods]
    with Lab(hosts, "200Mbit") as lab:
        running = [lab.start(host, command, environment(lab, host, 29500), **pipes) for host in range(hosts)]
        for method in methods:
            _, before = point(lab, running)
            said, after = point(lab, running)
            counted = [now - then for now, then in zip(after, before, strict=True)]
            found[method] = list(zip(counted, map(json.loads, said), strict=True))
        assert [process.wait(30) for process in running] == [0] * hosts
    return found


@pytest.mark.parametrize("hosts", [2, 3])
def test_interfaces_count_what_stats_report(hosts):
    found = exchange(hosts, ["vgc:alpha=1.0", "bf16"])
    for counted, stats in found["vgc:alpha=1.0"]:
        assert (stats["steps"], stats["dense_steps"]) == (12, 0)
        # an all-gather round the ring: a host sends its own message and passes on the others', but for the last
        assert stats["bytes_received"] == (hosts - 1) * stats["bytes_sent"]
        agree(counted, stats["bytes_received"])
    for counted, stats in found["bf16"]:
        assert stats["steps"] == 12
        # an all-reduce round the ring: W parts, each goes W - 1 steps to be summed, and as many to be known to all
        agree(counted, stats["bytes_sent"] * 2 * (hosts - 1) / hosts)


def agree(counted: Counters, payload: float) -> None:
    assert payload > 10 * FIXED
    assert payload < counted.bytes_sent < FRAMING * payload + FIXED
    assert payload < counted.bytes_received < FRAMING * payload + FIXED

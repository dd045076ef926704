"""`attach(model, "auto")` between hosts whose links change under it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.tools.lab import Lab, missing
from gradwire.tools.lab.commands import environment

pytestmark = [pytest.mark.skipif(bool(missing()), reason=f"a lab needs {missing()}"), pytest.mark.alone]

SCRIPT = Path(__file__).parent / "training.py"
MOST = 400  # steps
SUMS = {"dense", "bf16"}


class Training:
    """Real processes on the hosts of a lab."""

    def __init__(self, lab: Lab, compute_s: float) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(SCRIPT), str(MOST), str(compute_s)]
        self.running = [lab.start(host, command, environment(lab, host, 29500), **pipes) for host in range(len(lab))]
        self.said: list[str] = []
        for process in self.running:
            self.facts(process)

    def facts(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        while line := process.stdout.readline():
            if line == "ready\n":
                return {}
            if line.startswith("{"):
                return json.loads(line)
            self.said.append(line)
        raise AssertionError(f"a host has ended: {self.said}")

    def step(self) -> dict[str, Any]:
        """The next step of all hosts, which say the same."""
        first, *others = (self.facts(process) for process in self.running)
        assert all(other == first for other in others)
        return first

    def until(self, methods: set[str], steps: int) -> None:
        """One of them is in use."""
        for _ in range(steps):
            if self.step()["method"] in methods:
                return
        raise AssertionError(f"none of {methods} within {steps} steps: {self.said}")

    def end(self) -> None:
        for process in self.running:
            process.stdin.write("\n")
            process.stdin.flush()
        while "parameters" not in (facts := self.step()):
            assert "step" in facts
        assert all(process.wait(30) == 0 for process in self.running)


def test_it_compresses_when_the_link_becomes_slow():
    with Lab(3, "unlimited") as lab:
        training = Training(lab, compute_s=0.2)  # far from where another choice would be right
        for _ in range(15):
            now = training.step()
            assert now["method"] in SUMS
            assert not now["swapped"]
        assert now["words"]
        for host in range(3):
            lab.set_rate(host, "20Mbit")
        training.until({"vgc"}, 20)
        assert sum("vgc: on this link" in line for line in training.said) == 1
        for _ in range(10):
            now = training.step()
        assert now["swapped"]
        training.end()


def test_it_stops_compressing_when_the_link_becomes_fast():
    with Lab(2, "10Mbit") as lab:
        training = Training(lab, compute_s=0.05)
        training.until({"vgc"}, 30)
        for host in range(2):
            lab.set_rate(host, "unlimited")
        training.until(SUMS, MOST - 60)
        assert not training.step()["swapped"]
        training.end()

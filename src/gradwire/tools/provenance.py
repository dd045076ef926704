"""Where a figure comes from: the code, the versions, the machine and the command it was measured with."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import gradwire

PACKAGE = Path(gradwire.__file__).parent


def provenance(device: str = "cpu", command: str = "") -> dict[str, str]:
    """Columns for a file of results; nothing in them names the machine or its folders."""
    return {
        "commit": commit(),
        "gradwire": gradwire.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": hardware() if device == "cpu" else torch.cuda.get_device_name(),
        "command": command or shlex.join(["gradwire", *sys.argv[1:]]),
    }


def commit() -> str:
    """The short hash of the checkout this package runs from; empty when it is installed, or git is missing.

    A copy without its history is told by GRADWIRE_COMMIT.
    """
    if told := os.environ.get("GRADWIRE_COMMIT"):
        return told
    question = ["git", "-C", str(PACKAGE), "rev-parse", "--show-prefix", "--short", "HEAD"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    # a package installed into a .venv of another project lies inside that project's repository
    return answer[1] if answer[:1] == ["src/gradwire/"] else ""


def hardware() -> str:
    """The processor's name, or at least its kind, and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"

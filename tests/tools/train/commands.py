"""Runs the command line as a user does: `python -m gradwire ...` in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]
TIMEOUT_S = 90


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what torchrun would have set."""
    ours = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "COLUMNS": "120", **more}


def run_command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`python -m gradwire <arguments>` to its end."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    settings = clean_environment(**environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=settings)


def children(pid: int) -> list[int]:
    """The processes a process has started: a launcher's workers."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

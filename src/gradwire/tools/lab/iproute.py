"""iproute2: whether it can be used here, and the one function through which all of its commands go."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # not everybody's PATH has them
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bits; in a container root may lack them


class LabError(Exception):
    """A command of iproute2 has failed; the message has its words."""


def missing() -> str:
    """What this machine lacks for network namespaces of our own, in words; empty where nothing is missing."""
    if sys.platform != "linux":
        return "Linux: network namespaces are its own"
    lacking = [f"the command {name} (package iproute2)" for name in ("ip", "tc") if find(name) is None]
    if os.geteuid() != 0:
        lacking.append("root: try sudo")
    else:
        lacking += [f"{name}, which this container's root has not" for name in CAPABILITIES if not holds(name)]
    return ", ".join(lacking)


def find(name: str) -> str | None:
    """Where a program is."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH]))


def holds(capability: str) -> bool:
    """Whether this process has a capability."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAPABILITIES[capability] & 1)
    return False


def call(*words: str) -> str:
    """Run ip or tc and return what it prints."""
    # in a session of its own: Ctrl-C on a terminal must not end the command that cleans up
    command = [find(words[0]) or words[0], *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LabError(f"`{shlex.join(words)}` failed: {said}")
    return done.stdout

"""`python -m tests.gpu`: all tests that are marked `gpu`, and their log. `make gpu-tests` is the same.

Further arguments go to pytest (`-n 4`). The log begins with the commit: the variable GRADWIRE_COMMIT, else git's.
`python -m tests.gpu --since`: what has changed since that commit, in one line.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = ROOT / "benchmarks" / "results" / "gpu-tests.log"
# Everything under src/ can meet a GPU but the commands, shaped links and machine code for the CPU.
NO_GPU = re.compile(r"gradwire/tools/(cli|lab|race)/|/cpu/|_cpu|/cpu\.py")
REASON = 160  # letters of what is wrong with a test


class Outcomes:
    """A pytest plugin: what became of every test."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test's setup, call and teardown, in turn: the call, unless one of the others says something else."""
        if report.when == "call" or not report.passed:
            self._note(report, "error" if report.failed and report.when != "call" else report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, or is skipped whole."""
        if not report.passed:
            self._note(report, "error" if report.failed else report.outcome)

    def _note(self, report: Any, outcome: str) -> None:
        why = "" if outcome == "passed" else report.longrepr[-1] if outcome == "skipped" else report.longreprtext
        lines = [line for line in why.splitlines() if line.startswith("E ")] or why.splitlines()[-1:]
        self._found[report.nodeid] = outcome, " ".join(lines[:1])[:REASON]

    def lines(self) -> list[str]:
        """In the same order every time, and how many there are of each."""
        counts = Counter(outcome for outcome, _ in self._found.values())
        found = sorted(f"{outcome.upper()} {test} {why}".rstrip() for test, (outcome, why) in self._found.items())
        return [*found, ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))]


def marked_files() -> list[str]:
    """Those with GPU tests, so that a plugin that only others need may be missing."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text(encoding="utf-8"))


def run(arguments: list[str]) -> int:
    """Exit code: 0 if all tests passed."""
    try:
        import pytest
        import torch
    except ImportError as error:
        print(f"The GPU tests need {error.name}, which is not installed here: pip install {error.name}")
        return 1
    if not torch.cuda.is_available():
        print("The GPU tests need a CUDA device, and torch finds none here. Their log stays as it is.")
        return 1
    os.chdir(ROOT)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for the processes that tests start
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    options = ["-m", "gpu", "-q", "-o", "addopts=", "--strict-markers", "--continue-on-collection-errors"]
    if importlib.util.find_spec("pytest_timeout"):  # addopts has options of plugins that may not be there
        options.append("--timeout=300")
    outcomes = Outcomes()
    code = pytest.main([*options, *arguments, *marked_files()], [outcomes])
    LOG.write_text("\n".join([*head(arguments), *outcomes.lines()]) + "\n", encoding="utf-8")
    print(f"{os.path.relpath(LOG)}: {outcomes.lines()[-1]}")
    return int(code)


def head(arguments: list[str]) -> list[str]:
    """The commit, and what it ran on."""
    import torch

    try:
        import triton

        compiler = f"Triton {triton.__version__}"
    except ImportError:
        compiler = "no Triton"
    said = os.environ.get("GRADWIRE_COMMIT")  # by whom has brought the files here: git may know nothing of them
    changed = None if said else git("status", "--porcelain", "--", "src", "tests")
    commit = said or git("rev-parse", "HEAD") or "unknown"
    return [
        f"gradwire {commit}" + (" and what was not committed" if changed else ""),
        f"torch {torch.__version__}, {compiler}, Python {platform.python_version()}, {torch.cuda.get_device_name()}",
        *([f"with {' '.join(arguments)}"] if arguments else []),
    ]


def since() -> str:
    """How many files that a GPU can meet have changed since the commit of the log."""
    written = re.match(r"gradwire ([0-9a-f]{7,40})\b", LOG.read_text(encoding="utf-8")) if LOG.exists() else None
    if written is None:
        return "GPU tests: their log names no commit: run `make gpu-tests` where there is a GPU"
    commit = written[1]
    changed, new = git("diff", "--name-only", commit, "--", "src"), git("ls-files", "-o", "--exclude-standard", "src")
    if changed is None or new is None:
        return f"GPU tests: git does not know commit {commit[:8]} of their log here, so nobody can say what has changed"
    files = [name for name in f"{changed}\n{new}".split() if name.endswith(".py") and not NO_GPU.search(name)]
    what = f"{len(files)} file{'s' * (len(files) != 1)} under src/ that a GPU can meet"
    advice = ": run `make gpu-tests` where there is one" if files else ""
    return f"GPU tests: {what} changed since they ran, at {commit[:8]}{advice}"


def git(*command: str) -> str | None:
    """What git says, if it is there and has no objection."""
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:] == ["--since"]:
        print(since())
    else:
        sys.exit(run(sys.argv[1:]))

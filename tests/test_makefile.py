"""What `make` would do: the benchmarks' peers stay out of the environment of the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_benchmarks_peers_are_installed_where_no_test_meets_them(tmp_path: Path) -> None:
    """BackPACK brings a torchvision that does not load beside the CPU's torch, and transformers imports it.

    Asked where nothing is installed yet: here an environment of the benchmarks may be there already.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", "--no-print-directory"]
    shown = subprocess.run([*command, "bench"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "'.[bench]'" in shown
    assert "-m benchmarks cpu" in shown
    assert not re.search(r"\.venv(/|$)", shown, re.MULTILINE)
    for other in ("demo", "lint", "results", "docs-demo"):
        shown = subprocess.run([*command, other], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert "[bench]" not in shown

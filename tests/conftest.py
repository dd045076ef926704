"""Fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file: workers, oracle

import warm
from workers import Pool


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its processes."""
    several = getattr(session.config.option, "numprocesses", None)
    if several and not hasattr(session.config, "workerinput"):
        warm.compile_kernels()


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start workers of their own go to one process, first; all others file by file.

    Two of them at a time on two cores take longer than one after the other.
    """
    here = Path(__file__).parent
    groups = {item: _group(item, here) for item in items}
    items.sort(key=lambda item: groups[item] != "workers")
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item]))


def _group(item: pytest.Item, here: Path) -> str:
    path = item.path.relative_to(here).as_posix()
    alone = path.startswith("train/") and path != "train/test_methods_command.py"
    return "workers" if alone or "spawn" in getattr(item, "fixturenames", ()) else path


@pytest.fixture(scope="session")
def spawn() -> Iterator[Pool]:
    """spawn(n, function, *args): runs it in n real Gloo processes and returns the results by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

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


# seconds, roughly, of the files that take longest: one that begins last would be waited for
LONGEST = {
    "train/test_train_resume.py": 150,
    "train/test_train_command.py": 140,
    "kernels/test_triton.py": 110,
    "train/test_train_interrupt.py": 60,
    "compressors/test_workers.py": 50,
    "test_checkpoint.py": 48,
    "test_refusals.py": 42,
    "test_ddp.py": 33,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    here = Path(__file__).parent
    items.sort(key=lambda item: -LONGEST.get(item.path.relative_to(here).as_posix(), 0))


@pytest.fixture(scope="session")
def spawn() -> Iterator[Pool]:
    """spawn(n, function, *args): runs it in n real Gloo processes and returns the results by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

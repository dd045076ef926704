"""Fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file: workers, oracle

import warm
from interpreted import interpreting  # noqa: F401 a fixture for all files
from workers import Pool


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its processes."""
    several = getattr(session.config.option, "numprocesses", None)
    if several and not hasattr(session.config, "workerinput"):
        warm.compile_kernels()


@pytest.fixture(scope="session")
def spawn() -> Iterator[Pool]:
    """spawn(n, function, *args): runs it in n real Gloo processes and returns the results by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""Fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file: workers, oracle

from workers import Pool


@pytest.fixture(scope="session")
def spawn() -> Iterator[Pool]:
    """spawn(n, function, *args): runs it in n real Gloo processes and returns the results by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""Fixtures for the tests of moments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, for DDP."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    # A thread of Gloo drops the last sum, for which it needs the interpreter's lock. A DDP that outlives the group
    # waits for that thread when it goes, lock in hand: both would wait for ever.
    time.sleep(0.02)
    dist.destroy_process_group()

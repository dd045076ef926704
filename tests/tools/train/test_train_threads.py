"""How many threads a worker takes: its part of the cores, or what OMP_NUM_THREADS says."""

import os
import subprocess
import sys

import pytest
import torch

from gradwire.tools.train.worker_group import divide_cores

SHOW = """
import torch
from gradwire.tools.train.worker_group import joined
with joined("cpu"):
    print(torch.get_num_threads())
"""


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_cores_are_divided_unless_the_environment_says_how_many() -> None:
    torch.set_num_threads(3)
    divide_cores(1, {"OMP_NUM_THREADS": "3"})
    assert torch.get_num_threads() == 3
    for empty in ({}, {"OMP_NUM_THREADS": ""}):
        torch.set_num_threads(3)
        divide_cores(10_000, empty)
        assert torch.get_num_threads() == 1
        divide_cores(1, empty)
        assert torch.get_num_threads() == os.cpu_count()


def test_a_worker_alone_on_its_host_has_the_threads_it_was_given() -> None:
    """As on a host of a lab: one worker on the machine by LOCAL_WORLD_SIZE, and the cores are not its own."""
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, env={**os.environ, **ours})
    assert done.stdout == "1\n", done.stderr

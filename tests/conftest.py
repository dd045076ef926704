"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Two test processes with two threads each on two cores: threads that wait for each other and keep a core busy meanwhile
# make every operation wait for a time slice. Measured beside other work, for half of the tests: 103 seconds of a core
# instead of more than 236. It is read when torch is imported, and all processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file: workers, oracle

import warm
from interpreted import interpreting  # noqa: F401 a fixture for all files
from workers import Pool

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start with them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its processes."""
    several = getattr(session.config.option, "numprocesses", None)
    if several and not hasattr(session.config, "workerinput"):
        warm.compile_kernels()


# Files of more than ten seconds, longest first: with one of them last, a process would have nothing to do meanwhile.
LONG = (
    *("train_command", "train_restarts", "train_resume", "train_sockets", "train_orphans", "workers", "ddp", "triton"),
    *("train_local", "local_state", "local_as_real", "local_loops", "local_steps", "local_simulation", "race_command"),
    *("plan_command", "checkpoint", "checkpoint_damage", "triton_density"),
    *("compile", "compile_layers", "precision", "refusals", "density", "methods_command", "pipeline", "auto"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A missing GPU is a visible skip. And the order in which xdist's processes take files (--no-loadscope-reorder)."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):
        places = {f"test_{name}": place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it leaves plain torch alone, as where no compiler is installed."""
    from gradwire import codec

    questions = (codec.numba_ready, codec.triton_ready)

    def leave() -> None:
        monkeypatch.setattr(codec, "select", lambda device: codec.reference)
        for question in questions:
            question.cache_clear()

    yield leave
    monkeypatch.undo()
    for question in questions:
        question.cache_clear()


@pytest.fixture(scope="session")
def spawn() -> Iterator[Pool]:
    """spawn(n, function, *args): runs it in n real Gloo processes and returns the results by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """No tf32. Not by monkeypatch: torch's switches are no attributes that it could give back."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.allow_tf32 = value

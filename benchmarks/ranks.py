"""Processes that measure together: `on_ranks` calls one function on every rank of a Gloo group on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=120)


def on_ranks(world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """function(*args) of every rank, each in a process of its own. NCCL refuses two ranks on one GPU, Gloo does not."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world_size, get_context("spawn")) as pool:
        store = str(Path(folder) / "store")
        answers = [pool.submit(_call, rank, world_size, store, function, args) for rank in range(world_size)]
        return [answer.result() for answer in answers]


def _call(rank: int, world_size: int, store: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", f"file://{store}", TIMEOUT, world_size, rank)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()

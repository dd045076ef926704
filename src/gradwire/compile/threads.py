"""Threads for compiled loops that release the GIL; used by kernels and wire formats on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

SMALL = 1 << 15  # elements below which a second thread costs more than it does


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Threads of our own, made when first needed: those of OpenMP are busy with the backward."""
    return ThreadPoolExecutor(thread_name_prefix="gradwire-kernel")


def shared(
    ranges: Sequence[tuple[Any, ...]], function: Callable[..., Any], *args: object, n_elements: int = SMALL
) -> list[Any]:
    """[function(*range, *args) for every range], in threads; the first runs here.

    All run here where there are few elements, or where torch has one thread: a worker with one core of its own is late
    by a turn of the scheduler for every piece that it gives to another thread.
    """
    if n_elements < SMALL or torch.get_num_threads() == 1:
        return [function(*one, *args) for one in ranges]
    rest = [pool().submit(function, *one, *args) for one in ranges[1:]]
    done = [function(*one, *args) for one in ranges[:1]]
    return done + [future.result() for future in rest]


def equal_parts(size: int, n_threads: int) -> list[tuple[int, int]]:
    """(begin, end) of equal parts of `size` elements, one for each thread that is worth it."""
    n_parts = max(1, min(n_threads, size // SMALL))
    step = -(-size // n_parts)
    return [(part * step, min(size, (part + 1) * step)) for part in range(n_parts)]

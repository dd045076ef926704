"""What a CUDA graph is captured in: nothing may happen meanwhile that is no part of it; and its branches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def calm() -> Iterator[None]:
    """No garbage is collected in it: among it may be an older graph, and its end breaks off the capture.

    And no weight comes from autocast's cache: one that was cast before would not be cast again by a replay.
    """
    collects, cached = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.collect()
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        if collects:
            gc.enable()


def on_branches(streams: Sequence[torch.cuda.Stream], work: Callable[[int], T]) -> list[T]:
    """[work(0), work(1), ...], each on its stream: behind what came before, and what comes next waits for all."""
    main, made = torch.cuda.current_stream(streams[0].device), []
    for number, stream in enumerate(streams):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            made.append(work(number))
    for stream in streams:
        main.wait_stream(stream)
    return made

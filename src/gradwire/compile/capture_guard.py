"""What a CUDA graph is captured in: nothing may happen meanwhile that is no part of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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

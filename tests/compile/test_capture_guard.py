"""What a CUDA graph is captured in."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gradwire.compile.capture_guard import calm


class Knot:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_before_is_gone_and_none_is_collected_in_it() -> None:
    older = weakref.ref(Knot())
    with calm():
        assert older() is None
        newer = weakref.ref(Knot())
        knots = [Knot() for _ in range(3 * gc.get_threshold()[0])]
        assert newer() is not None
        assert not torch.is_autocast_cache_enabled()
        del knots
    assert gc.isenabled()
    assert torch.is_autocast_cache_enabled()


def test_everything_is_as_before_after_an_error() -> None:
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), calm():
            raise ZeroDivisionError
        assert not gc.isenabled()
        assert torch.is_autocast_cache_enabled()
    finally:
        gc.enable()

"""How much of encode and exchange lies inside the backward with CPU tensors: two processes, as in overlap_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.overlap_gpu import SETTLE, Model, row_of, trace
from benchmarks.ranks import on_ranks

TINY = Model("GPT 3.7M", {"vocabulary": 2048, "positions": 128, "width": 256, "depth": 4}, 8, 128, bucket_mib=2)


def rows(model: Model = TINY, settle: int = SETTLE) -> Iterator[dict[str, Any]]:
    yield row_of(model, "2 processes, Gloo", on_ranks(2, trace, "cpu", model, settle)[0])

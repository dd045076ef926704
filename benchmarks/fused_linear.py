"""Measures the fused weight gradient + second moment of a Linear against cuBLAS's weight gradient alone, on one GPU.

A ratio of 1.2 means: gradient and moment together take 1.2 times what torch takes for the gradient. The two are timed
in turn, so that both see the same clocks and heat; each is one recorded CUDA graph, so that the host is not what is
measured (the rows "called from Python" are without graphs), and the L2 cache is cleared before every run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.gpu.choice import linear

# B, T, O, I, the most that dW and moment together may take as a multiple of dW alone
SHAPES: list[tuple[int, int, int, int, float | None]] = [
    (16, 1024, 4096, 1024, 1.2),
    (8, 2048, 8192, 2048, 1.2),
    (16, 1024, 3072, 768, 1.2),
    (32, 256, 4096, 1024, 1.5),
    (64, 64, 2048, 2048, None),
    (16, 1024, 768, 768, None),
    (16, 1024, 2304, 768, None),
    (16, 1024, 768, 3072, None),
    (16, 1024, 50257, 768, None),
    (256, 32, 1024, 1024, None),
    (512, 16, 1024, 1024, None),
    (1024, 8, 1024, 1024, None),
    (1024, 4, 1024, 1024, None),
    (1024, 2, 1024, 1024, None),
]


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles, fills caches
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turn(calls: list[Callable[[], Any]], rounds: int = 30) -> list[float]:
    """Median milliseconds of each call, one after the other in every round."""
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for number in range(rounds + 3):
        for call, pairs in zip(calls, times, strict=True):
            cache.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if number >= 3:
                pairs.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in pairs) for pairs in times]


def plain(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """torch's own weight gradient: one matrix product."""
    left, right = gradient.flatten(0, 1).T, x.flatten(0, 1)
    if dtype == x.dtype:
        return lambda: left @ right
    return lambda: torch.mm(left, right, out_dtype=dtype)


def row(shape: tuple[int, int, int, int, float | None], dtype: torch.dtype, graphs: bool) -> dict[str, Any]:
    """One shape: the operator against the plain product."""

    samples, positions, outputs, inputs, bar = shape
    gradient = torch.randn(samples, positions, outputs, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(samples, positions, inputs, dtype=torch.bfloat16, device="cuda")
    calls = [plain(gradient, x, dtype), lambda: linear(gradient, x, dtype)]
    reference_ms, time_ms = in_turn([recorded(call) for call in calls] if graphs else calls)
    ratio = time_ms / reference_ms
    return {
        "what": f"Linear dW + moment, B{samples} T{positions} {outputs}x{inputs}"
        + ("" if graphs else ", called from Python"),
        "against": f"cuBLAS dW, bfloat16 in, {str(dtype).removeprefix('torch.')} out",
        **dict(zip("BTOI", shape[:4], strict=True)),
        "dtype": "bfloat16",
        "time_ms": round(time_ms, 5),
        "reference_ms": round(reference_ms, 5),
        "ratio": round(ratio, 3),
        "bar": bar if graphs else None,
        "holds": None if bar is None or not graphs else ratio <= bar,
    }


def rows() -> Iterator[dict[str, Any]]:
    """Every shape, with bfloat16 and float32 results; the first ones again without graphs."""
    for shape in SHAPES:
        yield row(shape, torch.bfloat16, graphs=True)
        yield row(shape, torch.float32, graphs=True)
    for shape in SHAPES[:8]:
        yield row(shape, torch.bfloat16, graphs=False)

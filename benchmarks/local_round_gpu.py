"""What a round of local steps costs on a GPU: one worker, a model of the size of GPT-2's small one; at most 3 ms."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import gradwire
from benchmarks.ranks import on_ranks

Row = dict[str, Any]
SPEC, PARAMETERS, BAR_MS = "vgc:alpha=0,density=0.03125", 124_000_000, 3.0
WARM, ROUNDS = 4, 20


def rows() -> Iterator[Row]:
    time_ms = on_ranks(1, median_round, SPEC)[0]
    yield {
        "what": f"a round of local steps, {SPEC}, {PARAMETERS / 1e6:.0f} M parameters, one worker",
        "against": f"{BAR_MS:g} ms",
        "time_ms": time_ms,
        "reference_ms": BAR_MS,
        "bar": 1.0,
        "holds": time_ms <= BAR_MS,
    }


class Weights(nn.Module):
    """As many parameters as GPT-2 has, in matrices of its sizes."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = [768 * 50304] + [768 * 3072] * ((numel - 768 * 50304) // (768 * 3072))
        self.weights = nn.ParameterList(torch.randn(size // 768, 768, device="cuda") for size in sizes)


def median_round(spec: str) -> float:
    """The median of a round in ms, host and device together."""
    net = Weights(PARAMETERS)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    gradwire.local(net, optimizer, spec, every=1)
    changes = [torch.randn_like(p) * 1e-3 for p in net.parameters()]
    rounds = []
    for _ in range(WARM + ROUNDS):
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), changes)
        rounds.append(timed(optimizer.step))  # no gradients: the step is the wire's hook alone
    return statistics.median(rounds[WARM:])


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)

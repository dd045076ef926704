"""The collectives of W workers in one process: what each asks for is at hand. Also as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.compile.capture_guard import calm, on_branches
from gradwire.exchange.room import RoomPlan
from gradwire.exchange.step import Answer, Part, Step, answered, exchange
from gradwire.methods.base import Context, Rounds

FIRST = 2  # steps without a graph: they make the tables that are kept on the device
Run = Callable[[Callable[..., Any]], list[Any]]


def in_lockstep(parts: Sequence[Part], run: Run | None = None) -> int:
    """Every worker's exchange, collective by collective; the bytes that one of them gave.

    What is made of messages or of one sum is the same on all: one makes it. run: does what it is given for every rank;
    one after another without it.
    """
    run = run or (lambda work: [work(rank) for rank in range(len(parts))])
    talks, first, n_bytes = [exchange(part) for part in parts], parts[0], 0
    asks = run(lambda rank: next(talks[rank]))
    while asks[0] is not None:
        n_bytes += asks[0].n_bytes
        messages, total = _stacked([ask.message for ask in asks]), _stacked([ask.summand for ask in asks])
        total = None if total is None else total.sum(0)
        if not isinstance(first.method, Rounds):
            answered(talks[0], Answer(messages, total))
            break
        asks = run(lambda rank, total=total: answered(talks[rank], Answer(None, total.clone())))
    if first.finite is not None and first.arrival is not None:
        first.arrival.finite = torch.stack([part.finite for part in parts if part.finite is not None]).all()
    return n_bytes


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None


class CapturedStep:
    """Captures a step, and replays it whenever it is called; every worker is a branch of the graph.

    For methods whose steps are all alike: their Python takes longer than the GPU. A PowerSGD of eight workers launches
    thousands of small kernels a step.
    Its messages have no heads: nobody else touches them, and a head names the step.
    """

    def __init__(self, parts: Callable[[Step, Context], list[Part]], grads: Tensor, context: Context) -> None:
        """parts: of all workers; grads [W, N]: the same memory every time."""
        self._grads, self._graph = grads, torch.cuda.CUDAGraph()
        self._step = Step(context.step, RoomPlan(dense=False))
        self._parts = parts(self._step, replace(context, bare=True))
        streams = [torch.cuda.Stream() for _ in self._parts]  # type: ignore[no-untyped-call]
        with calm(), torch.cuda.graph(self._graph):
            self._n_bytes = in_lockstep(self._parts, partial(on_branches, streams))
        if self._parts[0].method.kind == "gather":
            self._n_bytes += FIXED * WORD_BYTES

    def __call__(self, step: Step, grads: Tensor) -> tuple[list[Part], int]:
        """What a replay writes is in memory that the next one writes again."""
        assert grads.data_ptr() == self._grads.data_ptr()
        self._graph.replay()
        step.undo.extend(self._step.undo)
        return self._parts, self._n_bytes

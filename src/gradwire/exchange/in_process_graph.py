"""A step of W workers in one process as one CUDA graph, for methods whose steps are all alike.

Their Python takes longer than the GPU: a PowerSGD of eight workers launches thousands of small kernels a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.compile.capture_guard import calm, on_branches
from gradwire.exchange.lockstep import in_lockstep
from gradwire.exchange.room import RoomPlan
from gradwire.exchange.step import Part, Step
from gradwire.methods.base import Context

FIRST = 2  # steps without a graph: they make the tables that are kept on the device


class CapturedStep:
    """Captures a step, and replays it whenever it is called; every worker is a branch of the graph.

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

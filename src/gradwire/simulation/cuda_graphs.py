"""The passes of several workers as one CUDA graph with a branch for each, so that they fill the GPU together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from gradwire.compile.capture_guard import calm, on_branches
from gradwire.simulation.virtual_worker import Loss, VirtualWorker


class CapturedPasses:
    """Runs batches [W, B, ...] like the one it was captured with; the results lie in the replicas."""

    def __init__(self, replicas: Sequence[VirtualWorker], loss: Loss, batch: Sequence[Tensor]) -> None:
        device = replicas[0].gradient.device
        self._batch = [tensor.clone() for tensor in batch]
        self._losses = torch.zeros(len(replicas), device=device)
        self._graph = torch.cuda.CUDAGraph()
        rows = [[tensor[rank] for tensor in self._batch] for rank in range(len(replicas))]
        streams = [torch.cuda.Stream(device) for _ in replicas]  # type: ignore[no-untyped-call]
        with torch.random.fork_rng([device]), calm(), ExitStack() as stack:
            for replica in replicas:
                stack.enter_context(replica.capturing())
            on_branches(streams, lambda rank: replicas[rank].survey(loss, rows[rank]))
            torch.cuda.synchronize(device)
            with torch.cuda.graph(self._graph):
                on_branches(streams, lambda rank: self._losses[rank].copy_(replicas[rank].record(loss, rows[rank])))

    def fits(self, batch: Sequence[Tensor]) -> bool:
        return all(
            one.shape == own.shape and one.dtype == own.dtype for one, own in zip(batch, self._batch, strict=True)
        )

    def run(self, batch: Sequence[Tensor]) -> Tensor:
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._losses.clone()

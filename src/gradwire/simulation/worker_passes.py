"""Forward and backward of all workers: one after another, each with its own random numbers, or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gradwire.simulation import random_state as randomness
from gradwire.simulation.cuda_graphs import CapturedPasses
from gradwire.simulation.virtual_worker import Loss, VirtualWorker


class Passes:
    """Call it with tensors [W, B, ...], a row a worker: the gradients lie in the workers' rows after it."""

    def __init__(self, replicas: Sequence[VirtualWorker], loss: Loss, seed: int, captures: bool) -> None:
        self.replicas, self.loss, self._captures = replicas, loss, captures
        self._device = replicas[0].gradient.device
        self._branches: CapturedPasses | None = None
        self._random = [self._seeded(seed, rank) for rank in range(len(replicas))]

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """The workers' losses, [W]."""
        workers = len(self.replicas)
        for tensor in batch:
            if tensor.shape[:1] != (workers,):
                shape = tuple(tensor.shape)
                raise ValueError(f"a step wants a row for each of the {workers} workers, got a tensor {shape}")
        if self._captures:
            if self._branches is None:
                self._branches = CapturedPasses(self.replicas, self.loss, batch)
            if self._branches.fits(batch):
                return self._branches.run(batch)
        losses = []
        with self._forked_random():
            for rank, replica in enumerate(self.replicas):
                randomness.set_state(self._random[rank], self._device)
                losses.append(replica.backward(self.loss, [tensor[rank] for tensor in batch]))
                self._random[rank] = randomness.get_state(self._device)
        return torch.stack(losses)

    def random_state(self) -> list[Tensor]:
        """Of every worker, and last of the caller."""
        return [*(state.clone() for state in self._random), randomness.get_state(self._device)]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Goes on with what `random_state` returned."""
        *self._random, here = (state.clone() for state in states)
        randomness.set_state(here, self._device)

    def _seeded(self, seed: int, rank: int) -> Tensor:
        with self._forked_random():
            randomness.seed_worker(seed, rank)
            return randomness.get_state(self._device)

    def _forked_random(self) -> AbstractContextManager[None]:
        """The caller's random numbers go on as if nothing had been drawn."""
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])

"""What a training task is: data, a network, a loss and a score. One file a task, one row in tasks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Schedule:
    """The learning rate of one optimizer: base (x workers), halved every so many epochs."""

    base: float
    times_workers: bool = False
    halve_every: int = 0

    def at(self, epoch: int, workers: int) -> float:
        """The learning rate in `epoch`, counted from 0."""
        halvings = epoch // self.halve_every if self.halve_every else 0
        return self.base * (workers if self.times_workers else 1) * 0.5**halvings


class Task(Protocol):
    """A loaded task. `samples` is the size of the training set; a sample is whatever `batch` makes of an index."""

    @property
    def name(self) -> str: ...

    @property
    def samples(self) -> int: ...

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of what `score` returns; the first is shown while training."""
        ...

    def fingerprint(self) -> str:
        """A digest of the data, so that a run is never resumed on other data."""
        ...

    def on(self, device: torch.device) -> Task:
        """The same with its data there; `batch` takes indices on any device then."""
        ...

    def make_model(self) -> nn.Module: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the training samples at `indices` [B]."""
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the batch."""
        ...

    def evaluate(self, model: nn.Module, share: slice = slice(None)) -> Tensor:
        """float64 sums over a worker's share of the held-out data; `score` takes their total over all workers."""
        ...

    def score(self, totals: Tensor) -> dict[str, float]: ...


@dataclass(frozen=True)
class TaskKind:
    """A row of the table of tasks: how to open it, and what it is run with when nothing else is said."""

    name: str
    about: str
    open: Callable[[Path | None], Task]
    epochs: int
    batch: int  # of a worker
    adam: Schedule = Schedule(1e-3)  # of all optimizers of its family
    sgd: Schedule = Schedule(0.1)
    weight_decay: float = 0.0

    def schedule(self, optimizer: str) -> Schedule:
        """The learning rate of an optimizer."""
        return self.adam if "adam" in optimizer else self.sgd

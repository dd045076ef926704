"""What a training task is: data, a network, a loss and a score. One file a task, one row in tasks.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


def schedules(adam: Schedule, sgd: Schedule) -> dict[str, Schedule]:
    """For all optimizers: those of a family have the same."""
    return {"adam": adam, "adamw": adam, "plain-adam": adam, "plain-adamw": adam, "plain": sgd, "sgd": sgd}


@dataclass(frozen=True)
class Defaults:
    """The hyper-parameters a task is run with when the command line says nothing else; `batch` is a worker's."""

    epochs: int
    batch: int
    schedules: Mapping[str, Schedule]
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Share:
    """Which part of an evaluation this worker does: every `world`-th item from `rank` on."""

    rank: int = 0
    world: int = 1


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

    def evaluate(self, model: nn.Module, share: Share) -> Tensor:
        """float64 sums over this worker's share of the held-out data; `score` takes their total over all workers."""
        ...

    def score(self, totals: Tensor) -> dict[str, float]: ...


@dataclass(frozen=True)
class TaskKind:
    """A row of the table of tasks: how to open it, and what is known before any data is read."""

    name: str
    about: str
    open: Callable[[Path | None], Task]
    defaults: Defaults = field(repr=False)

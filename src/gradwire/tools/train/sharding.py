"""Which samples a worker takes in which step: a pure function of (seed, epoch, rank), so a run can go on anywhere.

All workers share one permutation of the epoch. A step takes the next `world * batch` of it, and rank r the r-th piece.
The position in the permutation is counted in samples, so it means the same to another number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation [samples] of one epoch."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    return torch.from_numpy(generator.permutation(samples))


def steps_left(samples: int, world: int, batch: int, position: int = 0) -> int:
    """How many full steps the epoch still has; the ragged tail is dropped, so that all workers do the same number."""
    return (samples - position) // (world * batch)


def batches(order: Tensor, rank: int, world: int, batch: int, position: int = 0) -> Iterator[Tensor]:
    """The indices [batch] this rank takes, step by step, from `position` on."""
    for step in range(steps_left(len(order), world, batch, position)):
        start = position + (step * world + rank) * batch
        yield order[start : start + batch]


def endless(samples: int, seed: int, rank: int, world: int, batch: int) -> Iterator[tuple[int, Tensor]]:
    """(epoch, indices), epoch after epoch without an end."""
    for epoch in count():
        for indices in batches(epoch_order(samples, seed, epoch), rank, world, batch):
            yield epoch, indices

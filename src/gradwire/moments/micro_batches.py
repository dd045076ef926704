"""Step 1, moments: estimates where no exact formula serves: micro-batches as groups, or the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

ESTIMATORS = ("groups", "signs", "step")


class GroupSpread:
    """K micro-batches with contributions h_k of B_k samples each, g = sum h_k, B = sum B_k.

    v = (1 - 1/B) sum (h_k - g B_k/B)^2 / (1 - sum B_k^2/B^2) + g^2/B
    Kept as running mean and spread of h_k/B_k with weights B_k^2: sum h_k^2 - g^2/K would cancel in float32.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.mean = torch.zeros_like(like, dtype=dtype)
        self.spread = torch.zeros_like(like, dtype=dtype)
        self.samples = 0
        self.weight = 0
        self.count = 0

    def add(self, share: Tensor, samples: int) -> None:
        """Takes in h_k, in the parameter's shape."""
        if samples == 0:
            return
        weight = samples * samples
        self.weight += weight
        self.samples += samples
        self.count += 1
        away = share.to(self.mean.dtype) / samples - self.mean
        self.mean += away * (weight / self.weight)
        self.spread.addcmul_(away, away, value=weight * (1 - weight / self.weight))

    def moment(self, gradient: Tensor) -> Tensor:
        """v, in the parameter's shape; gradient: g."""
        total = gradient.to(self.mean.dtype)
        off_centre = self.mean - total / self.samples
        spread = self.spread + self.weight * off_centre.square()
        within = spread / (1 - self.weight / self.samples**2)
        return (1 - 1 / self.samples) * within + total.square() / self.samples


class MicroBatches:
    """The account of one accumulation's micro-batches, where an estimate may be asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.groups: GroupSpread | None = None
        self.share: Tensor | None = None  # what the one now arriving adds to a gradient that is there
        self._first_samples: int | None = None

    @property
    def several(self) -> bool:
        return self.groups is not None and self.groups.count > 1

    def count(self, held: Tensor, samples: int | None, number: int) -> None:
        """After the accumulation of the number-th, from 1; held: `.grad`; samples: its own."""
        if number == 1:
            self._first_samples = samples
        elif self.share is not None and samples is not None and self._first_samples is not None:
            if self.groups is None and number == 2:
                self.groups = GroupSpread(held, self.dtype)
                self.groups.add(held - self.share, self._first_samples)
            if self.groups is not None:
                self.groups.add(self.share, samples)
        self.share = None

"""A bucket cut into runs of elements that share a value: its tensors, or the columns of its matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.layout import Layout


class Runs:
    """R runs one after another, without gaps; what every step asks for is kept."""

    def __init__(self, lengths: Sequence[int], of_slots: Sequence[int]) -> None:
        self._lengths, self._of_slots = list(lengths), list(of_slots)  # elements of each run; runs of each tensor
        self.ends: np.ndarray[Any, Any] = np.cumsum(self._lengths, dtype=np.int64)
        self.numel = sum(self._lengths)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, device: torch.device) -> Tensor:
        """Elements of each run, int64 [R]."""
        return self._on(device)[0]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            both = (torch.tensor(part, dtype=torch.int64, device=device) for part in (self._lengths, self._of_slots))
            lengths, of_slots = both
            self._tables[device] = lengths, of_slots
        return self._tables[device]

    def spread(self, values: Tensor) -> Tensor:
        """One value a run, [R], becomes one value an element, [N]."""
        return torch.repeat_interleave(values, self.lengths(values.device), output_size=self.numel)

    def active(self, values: Tensor, active: Tensor | None) -> Tensor:
        """[R] with zeros in the runs of tensors that have no gradient in this step; active: bool [K] or None."""
        if active is None:
            return values
        of_runs = torch.repeat_interleave(active, self._on(values.device)[1], output_size=len(self))
        return torch.where(of_runs, values, torch.zeros_like(values))

    def largest(self, flat: Tensor) -> Tensor:
        """max |x| of each run, float32 [R]; 0 for an empty one."""
        lengths = self.lengths(flat.device)
        # unsafe: the lengths are right, and the check would wait for a GPU
        return torch.segment_reduce(flat.abs(), "max", lengths=lengths, initial=0.0, unsafe=True)

    def sums(self, integers: Tensor) -> Tensor:
        """The sum of each run, int64 [R]: of integers, so it depends on no order and on no neighbour."""
        until = torch.cumsum(integers, 0, dtype=torch.int64)
        ends = torch.cumsum(self.lengths(integers.device), 0)
        return torch.cat([until.new_zeros(1), until])[ends].diff(prepend=until.new_zeros(1))


@functools.lru_cache(maxsize=256)
def tensors_of(layout: Layout) -> Runs:
    """Every tensor is a run."""
    return Runs([slot.numel for slot in layout], [1] * len(layout))


@functools.lru_cache(maxsize=256)
def columns_of(layout: Layout) -> Runs:
    """Every output unit's weights are a run: the rows of a weight [O, ...]; a vector or a scalar is one."""
    lengths: list[int] = []
    of_slots: list[int] = []
    for slot in layout:
        n_columns = slot.shape[0] if len(slot.shape) > 1 else 1
        lengths += [slot.numel // max(1, n_columns)] * n_columns
        of_slots.append(n_columns)
    return Runs(lengths, of_slots)

"""A bucket cut into groups of consecutive elements that share a scale: tensors, parts of them, columns of matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import numba_ready
from gradwire.layout import Layout

Array = np.ndarray[Any, Any]


class ScaleGroups:
    """G groups one after another, without gaps, none across two tensors; what every step asks for is kept."""

    def __init__(self, layout: Layout, lengths: Array, n_groups: Array, size: int | None = None) -> None:
        """lengths [G]: elements of each; n_groups [K]: how many each tensor has; size: of the longest, where known."""
        self.layout, self.numel, self.size = layout, layout.numel, size
        self.ends: Array = np.cumsum(lengths, dtype=np.int64)
        self.begins = self.ends - lengths
        self.slots = np.repeat(np.arange(len(layout)), n_groups)  # the tensor of each group
        self._lengths, self._n_groups = lengths, n_groups
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.ends)

    @functools.cached_property
    def above(self) -> Layout:
        """A layout with one element for each group."""
        counts = self._n_groups.tolist()
        return Layout.of((slot.name, (count,)) for slot, count in zip(self.layout, counts, strict=True))

    def lengths(self, device: torch.device) -> Tensor:
        """Elements of each group, int64 [G]."""
        return self._on(device)[0]

    def n_groups(self, device: torch.device) -> Tensor:
        """Groups of each tensor, int64 [K]."""
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            lengths, n_groups = (torch.from_numpy(part).to(device) for part in (self._lengths, self._n_groups))
            self._tables[device] = lengths, n_groups
        return self._tables[device]

    def spread(self, values: Tensor) -> Tensor:
        """One value a group, [G], becomes one value an element, [N]."""
        return torch.repeat_interleave(values, self.lengths(values.device), output_size=self.numel)

    def active(self, values: Tensor, active: Tensor | None) -> Tensor:
        """[G] with zeros in the groups of tensors that have no gradient in this step; active: bool [K] or None."""
        return values if active is None else torch.where(self.of_tensors(active), values, torch.zeros_like(values))

    def of_tensors(self, values: Tensor) -> Tensor:
        """One value a tensor, [K], becomes one value a group, [G]."""
        return torch.repeat_interleave(values, self.n_groups(values.device), output_size=len(self))

    def largest(self, flat: Tensor) -> Tensor:
        """max |x| of each group, float32 [G]; 0 for an empty one."""
        if numba_ready(flat.device):
            from gradwire.arithmetic import groups_cpu

            return groups_cpu.largest(flat, self.ends)
        lengths = self.lengths(flat.device)
        # unsafe: the lengths are right, and the check would wait for a GPU
        return torch.segment_reduce(flat.abs(), "max", lengths=lengths, initial=0.0, unsafe=True)

    def sums(self, integers: Tensor) -> Tensor:
        """The sum of each group, int64 [G]: of integers, so it depends on no order and on no neighbour."""
        until = torch.cumsum(integers, 0, dtype=torch.int64)
        ends = torch.cumsum(self.lengths(integers.device), 0)
        return torch.cat([until.new_zeros(1), until])[ends].diff(prepend=until.new_zeros(1))

    def folded(self, flat: Tensor) -> Tensor:
        """The sum of each group of floats, [G], whose bits are the same on every device and in every bucket.

        Groups are rows with zeros behind a short one, up to a power of two: the second half of a row is added to the
        first until one element is left. No device has its own order then.
        """
        assert self.size is not None
        width = 1 << (self.size - 1).bit_length()
        if not len(flat):
            return flat.new_zeros(len(self))
        lengths, lane = self.lengths(flat.device), torch.arange(width, device=flat.device)
        places = (lengths.cumsum(0) - lengths)[:, None] + lane
        rows = torch.where(lane < lengths[:, None], flat[places.clamp_(max=len(flat) - 1)], 0)
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return rows[:, 0]


def cut(layout: Layout, sizes: Sequence[int], size: int | None = None) -> ScaleGroups:
    """Every tensor in groups of its size [K], the last one shorter, an empty one in one; size: of the longest."""
    numels, steps = _numels(layout), np.array(sizes, np.int64)
    n_groups = np.maximum(-(-numels // steps), 1)
    lengths = np.repeat(steps, n_groups)
    lengths[n_groups.cumsum() - 1] = numels - (n_groups - 1) * steps
    return ScaleGroups(layout, lengths, n_groups, size)


@functools.lru_cache(maxsize=256)
def groups_of(layout: Layout, size: int | None) -> ScaleGroups:
    """Groups of `size` elements; None: whole tensors."""
    return cut(layout, [size or max(slot.numel, 1) for slot in layout], size)


@functools.lru_cache(maxsize=256)
def columns_of(layout: Layout) -> ScaleGroups:
    """Every output unit's weights are a group: the rows of a weight [O, ...]; a vector or a scalar is one."""
    n_columns = np.array([slot.shape[0] if len(slot.shape) > 1 else 1 for slot in layout], np.int64)
    return ScaleGroups(layout, np.repeat(_numels(layout) // np.maximum(n_columns, 1), n_columns), n_columns)


def _numels(layout: Layout) -> Array:
    return np.array([slot.numel for slot in layout], np.int64)

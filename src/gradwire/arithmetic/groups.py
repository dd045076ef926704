"""Runs of consecutive elements of a tensor that share a scale, and sums over them whose bits are the same anywhere."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.compile.threads import SMALL
from gradwire.layout import Layout

BLOCK = 512  # elements that `sums` folds at once
Array = np.ndarray[Any, Any]


class Groups:
    """Every tensor of a layout cut into groups of `size` elements, the last one shorter; size None: whole tensors.

    An empty tensor has one, empty, group.
    """

    def __init__(self, layout: Layout, size: int | None) -> None:
        self.layout, self.size = layout, size
        starts = [
            np.arange(slot.offset, slot.offset + max(slot.numel, 1), size or max(slot.numel, 1)) for slot in layout
        ]
        self.slots = np.repeat(np.arange(len(layout)), [len(one) for one in starts])
        self.begins = np.concatenate([*starts, np.empty(0, np.int64)]).astype(np.int64)
        stops = np.array([slot.offset + slot.numel for slot in layout], np.int64)[self.slots]
        self.ends = np.minimum(self.begins + size, stops) if size else stops
        self._lengths: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.begins)

    @functools.cached_property
    def above(self) -> Layout:
        """A layout with one element for each group."""
        counts = np.bincount(self.slots, minlength=len(self.layout)).tolist()
        return Layout.of((slot.name, (count,)) for slot, count in zip(self.layout, counts, strict=True))

    def parts(self, n_threads: int) -> list[tuple[int, int]]:
        """Groups (first, last) for each thread, of about as many elements each."""
        n_parts = max(1, min(n_threads, self.layout.numel // SMALL))
        return [(len(self) * part // n_parts, len(self) * (part + 1) // n_parts) for part in range(n_parts)]

    def lengths(self, device: torch.device) -> Tensor:
        """int64 [G]; kept, because every step asks for it."""
        if device not in self._lengths:
            self._lengths[device] = torch.from_numpy(self.ends - self.begins).to(device)
        return self._lengths[device]

    def spread(self, values: Tensor) -> Tensor:
        """One value a group, [G], becomes one value an element, [N]."""
        return torch.repeat_interleave(values, self.lengths(values.device), output_size=self.layout.numel)

    def rows(self, flat: Tensor) -> Tensor:
        """[N] -> [G, P], a row a group, zeros behind a short one; P: the power of two that the size fits into."""
        assert self.size is not None
        width = 1 << (self.size - 1).bit_length()
        if not len(flat):
            return flat.new_zeros(len(self), width)
        lengths = self.lengths(flat.device)
        places = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(width, device=flat.device)
        within = torch.arange(width, device=flat.device) < lengths[:, None]
        return torch.where(within, flat[places.clamp_(max=len(flat) - 1)], 0)


@functools.lru_cache(maxsize=256)
def groups_of(layout: Layout, size: int | None) -> Groups:
    return Groups(layout, size)


def largest(flat: Tensor, groups: Groups) -> Tensor:
    """The largest |element| of each group, [G]."""
    return torch.segment_reduce(flat.abs(), "max", lengths=groups.lengths(flat.device), initial=0.0, unsafe=True)


def folded(rows: Tensor) -> Tensor:
    """Sums of rows [G, P]: the second half is added to the first until one is left. No device has its own order."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def sums(flat: Tensor, layout: Layout) -> Tensor:
    """The sum of each tensor, [K]: of blocks, then of blocks of these, until one a tensor is left."""
    groups = groups_of(layout, BLOCK)
    of_groups = folded(groups.rows(flat))
    return of_groups if len(groups) == len(layout) else sums(of_groups, groups.above)

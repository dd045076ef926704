"""A bucket cut for a GPU: tiles are runs of elements of one tensor and one chunk, groups are runs of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.compile.segments import pieces
from gradwire.layout import Layout

Array = np.ndarray[Any, Any]
ALIGN = 32  # elements: tiles begin at whole sectors of memory, so that loads are 16 bytes wide whatever came before


class TileTable(NamedTuple):
    """What kernels are told. T tiles, G groups, K tensors, C chunks."""

    base: Tensor  # int64 [T]: tile i has the places base[i] + low[i] .. base[i] + high[i] - 1
    low: Tensor  # int32 [T]
    high: Tensor  # int32 [T]
    slot: Tensor  # int32 [G], its tensor
    origin: Tensor  # int64 [G], the first place of its chunk
    first_of_slot: Tensor  # int32 [K + 1], the first group of each tensor
    first_of_chunk: Tensor  # int32 [C + 1]
    end: Tensor  # int64 [K], where each tensor ends
    live: Tensor | None = None  # uint8 [K], which tensors have a gradient; None: all


class Tiles:
    """The geometry on one device. A group has `group` tiles of `size` places; the last tiles of one may be empty."""

    def __init__(self, layout: Layout, device: torch.device, chunk: int, size: int, group: int) -> None:
        self.size, self.group, self.numel, self.n_slots = size, group, layout.numel, len(layout)
        cuts = list(pieces(layout, chunk))
        n_groups = [-(-(end - begin // ALIGN * ALIGN) // (size * group)) for _, begin, end in cuts]
        slot, begin, end = (np.repeat(column, n_groups) for column in np.array(cuts, np.int64).reshape(-1, 3).T)
        self.n_groups = len(slot)
        self.n_tiles = self.n_groups * group
        self.n_chunks = max(1, -(-layout.numel // chunk))
        number = np.arange(self.n_groups) - np.repeat(np.cumsum(n_groups) - n_groups, n_groups)
        bases = ((begin // ALIGN * ALIGN) + number * size * group)[:, None] + np.arange(group) * size
        lows = np.clip(begin[:, None] - bases, 0, size)
        highs = np.clip(end[:, None] - bases, lows, size)

        def put(values: Array, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(dtype).to(device)

        # Tiles that are full and those that are not: number, tensor, base in units of ALIGN.
        full = (highs - lows == size).reshape(-1)
        visits = (np.arange(self.n_tiles), np.repeat(slot, group), bases.reshape(-1) // ALIGN)
        self.whole, self.ragged = ([put(column[some]) for column in visits] for some in (full, ~full))
        self.table = TileTable(
            base=put(bases, torch.int64),
            low=put(lows),
            high=put(highs),
            slot=put(slot),
            origin=put(begin // chunk * chunk, torch.int64),
            first_of_slot=put(np.searchsorted(slot, np.arange(self.n_slots + 1))),
            first_of_chunk=put(np.searchsorted(begin // chunk, np.arange(self.n_chunks + 1))),
            end=layout.lengths(device).cumsum(0),
        )

    def table_with(self, active: Tensor | None) -> TileTable:
        """active: bool [K], tensors that have a gradient; None: all."""
        return self.table if active is None else self.table._replace(live=active.view(torch.uint8))


def tiles_of(layout: Layout, device: torch.device, chunk: int, size: int, group: int) -> Tiles:
    """Kept with the layout, because every step asks for it: a few bytes for some thousand elements."""
    key = (Tiles, device, chunk, size, group)
    if key not in layout.kept:
        layout.kept[key] = Tiles(layout, device, chunk, size, group)
    known: Tiles = layout.kept[key]
    return known


def on_device(numbers: Sequence[int] | Array, device: torch.device) -> Tensor:
    """int64 [n]. From pinned memory: a copy from any other would wait for the device."""
    host = torch.as_tensor(numbers, dtype=torch.int64)  # pinned next: torch 2.11 pins nothing that comes from numpy
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

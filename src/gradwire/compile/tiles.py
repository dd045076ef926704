"""A bucket cut for a GPU: tiles are runs of elements of one tensor and one chunk, groups are runs of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.compile.segments import pieces
from gradwire.layout import Layout

Array = np.ndarray[Any, Any]
ALIGN = 32  # elements: tiles begin at whole sectors of memory, so that loads are 16 bytes wide whatever came before


class Tiles:
    """The geometry on one device. A group has `group` tiles of `size` places; the last tiles of one may be empty.

    Tile i has the places base[i] + low[i] .. base[i] + high[i] - 1. T tiles, G groups, K tensors, C chunks.
    """

    def __init__(self, layout: Layout, device: torch.device, chunk: int, size: int, group: int) -> None:
        self.size, self.group, self.numel, self.n_slots = size, group, layout.numel, len(layout)
        cuts = list(pieces(layout, chunk))
        n_groups = [-(-(end - begin // ALIGN * ALIGN) // (size * group)) for _, begin, end in cuts]
        slot, begin, end = (np.repeat(column, n_groups) for column in np.array(cuts, np.int64).reshape(-1, 3).T)
        self.n_groups = len(slot)
        self.n_tiles = self.n_groups * group
        number = np.arange(self.n_groups) - np.repeat(np.cumsum(n_groups) - n_groups, n_groups)
        bases = ((begin // ALIGN * ALIGN) + number * size * group)[:, None] + np.arange(group) * size
        lows = np.clip(begin[:, None] - bases, 0, size)
        highs = np.clip(end[:, None] - bases, lows, size)

        def put(values: Array, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(dtype).to(device)

        self.base, self.low, self.high = put(bases, torch.int64), put(lows, torch.int32), put(highs, torch.int32)
        # Tiles that are full and those that are not: number, tensor, base in units of ALIGN.
        full = (highs - lows == size).reshape(-1)
        visits = (np.arange(self.n_tiles), np.repeat(slot, group), bases.reshape(-1) // ALIGN)
        self.whole, self.ragged = ([put(column[some], torch.int32) for column in visits] for some in (full, ~full))
        self.slot, self.origin = put(slot, torch.int32), put(begin // chunk * chunk, torch.int64)  # [G]
        self.n_chunks = max(1, -(-layout.numel // chunk))
        self.first_of_slot = put(np.searchsorted(slot, np.arange(len(layout) + 1)), torch.int32)
        self.first_of_chunk = put(np.searchsorted(begin // chunk, np.arange(self.n_chunks + 1)), torch.int32)
        self.offset = put(np.array([slot.offset for slot in layout], np.int64), torch.int64)  # [K]
        self.length = put(np.array([slot.numel for slot in layout], np.int64), torch.int64)  # [K]
        self.end = self.offset + self.length
        self.all_live = torch.ones(max(1, len(layout)), dtype=torch.uint8, device=device)


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

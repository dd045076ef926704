"""A bucket cut for threads: segments are runs of elements of one tensor, parts are runs of segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire.compile.threads import SMALL, shared
from gradwire.layout import Layout

Array = np.ndarray[Any, Any]
FEW = 1 << 18  # elements whose bookkeeping takes less than it takes to wake a thread, about a millisecond


class Segments:
    """Cut at the tensors, at the chunks of 2^28 places, and into as many parts as there are threads."""

    def __init__(self, layout: Layout, n_parts: int, chunk: int) -> None:
        self.spare: list[tuple[Array, ...]] = []  # arrays as long as the bucket, to be used again
        self.n_parts, self.n_slots, self.n_chunks = n_parts, len(layout), max(1, -(-layout.numel // chunk))
        step = max(1, -(-layout.numel // n_parts))
        cuts: list[tuple[int, int, int, int, int]] = []  # begin, end, slot, part, chunk
        for number, slot in enumerate(layout):
            begin, end = slot.offset, slot.offset + slot.numel
            while begin < end:
                part, piece = begin // step, begin // chunk
                stop = min(end, (part + 1) * step, (piece + 1) * chunk)
                cuts.append((begin, stop, number, part, piece))
                begin = stop
        table = np.array(cuts, dtype=np.int64).reshape(-1, 5)
        self.begins, self.ends, self.slots, parts, self.chunks = (np.ascontiguousarray(column) for column in table.T)
        self._of_parts = np.searchsorted(parts, np.arange(n_parts + 1))
        self.of_slots = np.searchsorted(self.slots, np.arange(self.n_slots + 1))
        self._whole = self.slots.tolist() == list(range(self.n_slots))  # every segment is a tensor

    def __len__(self) -> int:
        return len(self.begins)

    def each(self, function: Callable[..., None], *args: object, n_elements: int = FEW) -> None:
        """function(first, last, ...) for the segments of every part; for few elements at once, without threads."""
        if n_elements < FEW:
            function(0, len(self), *args)
            return
        shared([(self._of_parts[p], self._of_parts[p + 1]) for p in range(self.n_parts)], function, *args)

    def by_slot(self, counts: Array) -> Array:
        """Sums over the segments of each tensor, int32 [K, ...]."""
        if self._whole:
            return counts.astype(np.int32)
        totals = np.zeros((self.n_slots, *counts.shape[1:]), dtype=np.int32)
        np.add.at(totals, self.slots, counts.astype(np.int32))
        return totals

    def largest(self, numbers: Array) -> Array:
        """Over the segments of each tensor, [K]; of numbers >= 0."""
        if self._whole:
            return numbers
        found = np.zeros(self.n_slots, dtype=numbers.dtype)
        np.maximum.at(found, self.slots, numbers)
        return found

    def by_chunk(self, counts: Array) -> Array:
        """Sums over the segments of each chunk, int32 [C]."""
        return np.bincount(self.chunks, counts, minlength=self.n_chunks).astype(np.int32)


@functools.lru_cache(maxsize=256)
def segments_of(layout: Layout, n_threads: int, chunk: int) -> Segments:
    return Segments(layout, max(1, min(n_threads, layout.numel // SMALL)), chunk)

"""A bucket cut for threads: segments are runs of elements of one tensor, parts are runs of segments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from gradwire.compile.threads import SMALL
from gradwire.layout import Layout

Array = np.ndarray[Any, Any]


def pieces(layout: Layout, *lengths: int) -> Iterator[tuple[int, int, int]]:
    """(number of the tensor, begin, end) of every part of a tensor, cut at all multiples of these lengths."""
    for number, slot in enumerate(layout):
        begin, end = slot.offset, slot.offset + slot.numel
        while begin < end:
            stop = min(end, *((begin // length + 1) * length for length in lengths))
            yield number, begin, stop
            begin = stop


class Segments:
    """Cut at the tensors, at the chunks of 2^28 places, and into as many parts as there are threads."""

    def __init__(self, layout: Layout, n_parts: int, chunk: int) -> None:
        self.spare: list[tuple[Array, ...]] = []  # arrays as long as the bucket, to be used again
        self.n_slots, self.n_chunks = len(layout), max(1, -(-layout.numel // chunk))
        step = max(1, -(-layout.numel // n_parts))
        cuts: list[tuple[int, int, int, int, int]] = []  # begin, end, slot, part, chunk
        for number, begin, end in pieces(layout, step, chunk):
            cuts.append((begin, end, number, begin // step, begin // chunk))
        self.count = len(cuts)
        table = np.array(cuts, dtype=np.int64).reshape(-1, 5)
        self.begins, self.ends, self.slots, parts, self.chunks = (np.ascontiguousarray(column) for column in table.T)
        edges = np.searchsorted(parts, np.arange(n_parts + 1)).tolist()
        self.parts = list(pairwise(edges))
        self.of_slots = np.searchsorted(self.slots, np.arange(self.n_slots + 1))

    @classmethod
    def of(cls, layout: Layout, n_threads: int, chunk: int) -> Segments:
        """Kept with the layout."""
        key = (Segments, n_threads, chunk)
        if key not in layout.kept:
            layout.kept[key] = cls(layout, max(1, min(n_threads, layout.numel // SMALL)), chunk)
        known: Segments = layout.kept[key]
        return known

    def by_slot(self, counts: Array) -> Array:
        """Sums over the segments of each tensor, int32 [K]."""
        return np.bincount(self.slots, counts, minlength=self.n_slots).astype(np.int32)

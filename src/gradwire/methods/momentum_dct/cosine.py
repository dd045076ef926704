"""A bucket cut into tiles, and the orthonormal cosine transform (DCT-II) of every tile.

A tensor is a matrix: a vector one of a single row, more dimensions the first by all others. Its rows and its columns
are cut into as few pieces of at most `chunk` as there can be, whose lengths differ by at most one: so a tensor is at
most four regions of equal tiles. Tensor by tensor, because a product's last bits may depend on its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, product

import torch
from torch import Tensor

from gradwire.layout import Layout, Slot


@dataclass(frozen=True)
class Region:
    """Equal tiles of one tensor, `begin` elements behind the front of all coefficients."""

    slot: Slot
    rows: tuple[int, int]  # of the matrix, from .. to
    columns: tuple[int, int]
    tile: tuple[int, int]  # a, b
    begin: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles below and beside each other."""
        pairs = zip((self.rows, self.columns), self.tile, strict=True)
        down, across = ((end - begin) // side for (begin, end), side in pairs)
        return down, across

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    @property
    def size(self) -> int:
        """Elements of a tile."""
        return math.prod(self.tile)

    def tiles(self, flat: Tensor) -> Tensor:
        """The tiles of this region in a flat bucket, a view [down, across, a, b]."""
        matrix = self.slot.of(flat).view(self.slot.shape[0] if len(self.slot.shape) > 1 else 1, -1)
        part = matrix[slice(*self.rows), slice(*self.columns)]
        (down, across), (a, b) = self.grid, self.tile
        return part.view(down, a, across, b).transpose(1, 2)

    def of(self, coefficients: Tensor) -> Tensor:
        """[down, across, a, b], a view."""
        return coefficients[self.begin : self.begin + self.count * self.size].view(*self.grid, *self.tile)


@dataclass(frozen=True)
class Group:
    """All tiles of one size in a bucket, whatever their tensor: n of them, one after another from `begin` on."""

    begin: int
    count: int
    size: int

    def of(self, coefficients: Tensor) -> Tensor:
        """[n, size], a view."""
        return coefficients[self.begin : self.begin + self.count * self.size].view(self.count, self.size)

    def starts(self, device: torch.device) -> Tensor:
        """Where each tile begins, int64 [n, 1]."""
        return torch.arange(self.begin, self.begin + self.count * self.size, self.size, device=device)[:, None]


@dataclass(frozen=True, eq=False)
class CosineTiles:
    """The regions of a bucket by the size of their tiles, and the groups that they make."""

    layout: Layout
    regions: tuple[Region, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        runs = (list(run) for _, run in groupby(self.regions, lambda region: region.size))
        return tuple(Group(run[0].begin, sum(region.count for region in run), run[0].size) for run in runs)

    def transform(self, flat: Tensor) -> Tensor:
        """C = D_a X D_b^T for every tile X: coefficients [N]."""
        out = torch.empty_like(flat)
        for region in self.regions:
            rows, columns = (_cosines(side, flat.device) for side in region.tile)
            region.of(out).copy_(_between(rows, region.tiles(flat), columns.T))
        return out

    def inverse(self, coefficients: Tensor, out: Tensor) -> Tensor:
        """out = X = D_a^T C D_b for every tile."""
        for region in self.regions:
            rows, columns = (_cosines(side, out.device) for side in region.tile)
            region.tiles(out).copy_(_between(rows.T, region.of(coefficients), columns))
        return out


@lru_cache(maxsize=64)
def components(tiles: CosineTiles, most: int, device: torch.device) -> Tensor:
    """How many each tensor has, int64 [K], if every tile has `most`, or all of its own."""
    counts = dict.fromkeys(tiles.layout.names, 0)
    for region in tiles.regions:
        counts[region.slot.name] += region.count * min(most, region.size)
    return torch.tensor(list(counts.values()), device=device)


def _between(left: Tensor, tiles: Tensor, right: Tensor) -> Tensor:
    """left @ tile @ right. From a copy of its own, so that it is aligned in memory the same way in any bucket."""
    own = torch.empty(tiles.shape, dtype=tiles.dtype, device=tiles.device).copy_(tiles)
    if len(right) > 1:
        own = own @ right
    return left @ own if len(left) > 1 else own


@lru_cache(maxsize=64)
def tiles_of(layout: Layout, chunk: int) -> CosineTiles:
    regions = sorted((region for slot in layout for region in _regions(slot, chunk)), key=lambda region: region.size)
    begins = accumulate((region.count * region.size for region in regions), initial=0)
    placed = (replace(region, begin=begin) for region, begin in zip(regions, begins, strict=False))
    return CosineTiles(layout, tuple(placed))


def _regions(slot: Slot, chunk: int) -> list[Region]:
    if not slot.numel:
        return []
    n_rows = slot.shape[0] if len(slot.shape) > 1 else 1
    cuts = product(_pieces(n_rows, chunk), _pieces(slot.numel // n_rows, chunk))
    return [Region(slot, rows[:2], columns[:2], (rows[2], columns[2])) for rows, columns in cuts]


def _pieces(length: int, chunk: int) -> list[tuple[int, int, int]]:
    """(from, to, length of a piece): the longer pieces, then those that are shorter by one, if there are any."""
    n_pieces = -(-length // chunk)
    short, n_long = divmod(length, n_pieces)
    middle = n_long * (short + 1)
    return [run for run in ((0, middle, short + 1), (middle, length, short)) if run[0] < run[1]]


@lru_cache(maxsize=64)
def _cosines(side: int, device: torch.device) -> Tensor:
    """D, orthonormal: D[u, x] = sqrt(2 / n) cos(pi (2 x + 1) u / 2 n), the first row over sqrt 2."""
    place = torch.arange(side, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * place + 1) * place[:, None] / (2 * side)) * math.sqrt(2 / side)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)

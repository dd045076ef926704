"""Step 1, moments: how Hopper's kernel cuts a convolution or a Linear, and how programs share it. No Triton here.

A plan follows from a cost model, whose numbers were measured on an H200, and is remembered by the process. Nothing is
timed while a model trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradwire.moments.gpu.convolution_plans import ConvolutionShape

TILE_ROWS = 128  # outputs in a tile
BAND = 16  # columns of tiles in a band, see hopper_tiles.place


@dataclass(frozen=True)
class Boxes:
    """How Hopper's kernel cuts a shape: boxes of high x wide positions, tiles of 128 outputs x `columns` inputs.

    stages: buffers in the ring.
    programs, whole, share: `whole` tiles go round `programs`; the others are cut into parts of `share` samples.
    """

    high: int
    wide: int
    columns: int
    stages: int
    programs: int
    whole: int
    share: int


class TileShares(NamedTuple):
    """Tiles in a column and a row of a weight, and samples; tiles that run whole, and the rest of them, each in so many
    parts of `share` samples."""

    rows: int
    columns: int
    samples: int
    whole: int
    rest: int
    parts: int
    share: int


def shares(
    tiles: int, samples: int, positions: float, programs: int, launch_us: float, most_parts: int
) -> tuple[int, int]:
    """(whole, share): how many tiles run whole, and how many samples a part of the others has; the cheapest by a model.

    144 tiles (3072 x 768) on 132 multiprocessors would take two rounds; 132 whole and 12 in eighths take 1.125.
    """
    sample_us = 5.4e-3 * positions + 0.3  # H200: one sample of a 128 x 128 tile
    best = (-(-tiles // programs) * samples * sample_us, tiles, samples)
    parts = {-(-samples // n_parts) for n_parts in range(2, min(samples, most_parts) + 1)}
    for rounds in range(max(0, tiles // programs - 1), tiles // programs + 1):
        rest = tiles - rounds * programs
        for share in parts if rest else ():
            total = rest * -(-samples // share)
            join_us = launch_us + 0.1 * total  # 128 kB a part written and read, less shared in L2
            turns = rounds * samples + -(-total // programs) * share
            best = min(best, (turns * sample_us + join_us, rounds * programs, share))
    return best[1], best[2]


def linear_boxes(samples: int, positions: int, outputs: int, inputs: int, programs: int) -> Boxes:
    """Short samples get short boxes, because zeros would be multiplied too."""
    step = next((size for size in (16, 32) if positions <= size), 64)
    tiles = -(-outputs // TILE_ROWS) * -(-inputs // 128)
    whole, share = shares(tiles, samples, positions, programs, launch_us=8.0, most_parts=16)
    return Boxes(1, step, 128, 6 * 64 // step, programs, whole, share)


def box_of(geometry: ConvolutionShape) -> tuple[int, int]:
    """(high, wide): the box that multiplies the fewest zeros; a step costs as much as 24 positions besides."""
    sizes = [(high, step // high) for step in (16, 32, 64) for high in (8, 4, 2, 1)]

    def cost(box: tuple[int, int]) -> int:
        return -(-geometry.out_height // box[0]) * -(-geometry.out_width // box[1]) * (box[0] * box[1] + 24)

    return min(sizes, key=cost)


def convolution_boxes(geometry: ConvolutionShape, programs: int, pieces: int) -> Boxes:
    """Box, tile and shares of one shape."""
    high, wide = box_of(geometry)
    rows, inputs = -(-geometry.outputs // TILE_ROWS), geometry.taps * geometry.channels
    # few tiles are made twice as many; H200: 33 against 37 us for 512 -> 128 pointwise at 28 x 28
    narrow = rows * inputs // 128 < 24 or 100 <= rows * inputs // 64 <= programs
    columns = 64 if narrow or geometry.channels % 128 else 128
    stages = min(16, 196608 // (high * wide * (TILE_ROWS + columns) * 2))
    positions = geometry.positions * pieces * columns / 128
    tiles = rows * (inputs // columns)
    whole, share = shares(tiles, geometry.samples, positions, programs, launch_us=4.0, most_parts=geometry.samples)
    return Boxes(high, wide, columns, stages, programs, whole, share)

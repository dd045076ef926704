"""Step 1, moments: adds up the parts of tiles whose samples were shared between programs, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.gpu.hopper_plans import BAND, TILE_ROWS, TileShares

SIZES = ["outputs", "n_rows", "n_columns", "n_whole", "n_parts"]
GROUP = tl.constexpr(BAND)


@triton.jit(do_not_specialize=SIZES)
def join_parts_kernel(
    parts, weight_gradient, moment, outputs, inputs, n_rows, n_columns, n_whole, n_parts,
    most: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Program (tile, rows of it, gradient or moment): the sum over the parts of this tile."""
    other, which = tl.program_id(0), tl.program_id(2)
    part = tl.arange(0, most)
    slot = part * tl.num_programs(0) + other
    cell = tl.program_id(1) * at_once * columns + tl.arange(0, at_once * columns)
    places = parts + (2 * slot + which).to(tl.int64)[:, None] * (rows * columns) + cell[None, :]
    total = tl.sum(tl.load(places, mask=(part < n_parts)[:, None], other=0.0), axis=0)
    tile = n_whole + other
    band = tile // (n_rows * GROUP)
    width = tl.minimum(n_columns - band * GROUP, GROUP)
    inside = tile - band * n_rows * GROUP
    row = (inside // width) * rows + cell // columns
    column = (band * GROUP + inside % width) * columns + cell % columns
    kept = (row < outputs) & (column < inputs)
    target = row.to(tl.int64) * inputs + column
    if which == 0:
        tl.store(weight_gradient + target, total.to(weight_gradient.dtype.element_ty), mask=kept)
    else:
        tl.store(moment + target, total, mask=kept)


def join_parts(
    parts: Tensor, results: tuple[Tensor, Tensor], shape: tuple[int, int], work: TileShares, at_once: int
) -> None:
    """parts [part of the samples, tile, 2, 128, columns] -> the tiles of both results that several programs shared.

    shape: of the weight as a matrix; at_once: rows of a tile that a program joins.
    """
    columns, most = parts.shape[-1], triton.next_power_of_2(work.parts)
    arguments = (
        *(parts, *results, *shape, work.rows, work.columns, work.whole, work.parts),
        *(most, TILE_ROWS, columns, at_once),
    )
    about = (most, columns, at_once, shape[1] % 16 == 0, shape[1] == 1)
    kind = (parts.device.index, results[0].dtype, *about)
    launch_again("join_parts", kind, join_parts_kernel, (work.rest, TILE_ROWS // at_once, 2), arguments, num_warps=4)

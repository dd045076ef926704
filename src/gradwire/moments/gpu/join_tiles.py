"""Step 1, moments: adds up the parts of tiles whose samples were shared between programs, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.gpu.linear_plans import LinearPlan

SIZES = ["outputs", "n_rows", "n_columns", "n_whole", "n_parts"]
TILE_ROWS = TILE_COLUMNS = 128
ROWS_AT_ONCE = 4


@triton.jit(do_not_specialize=SIZES)
def join_parts_kernel(
    parts, weight_gradient, moment, outputs, inputs, n_rows, n_columns, n_whole, n_parts,
    group: tl.constexpr, most: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Program (tile, rows of it, gradient or moment): the sum over the parts of this tile."""
    other, which = tl.program_id(0), tl.program_id(2)
    part = tl.arange(0, most)
    slot = part * tl.num_programs(0) + other
    cell = tl.program_id(1) * at_once * columns + tl.arange(0, at_once * columns)
    places = parts + (2 * slot + which).to(tl.int64)[:, None] * (rows * columns) + cell[None, :]
    total = tl.sum(tl.load(places, mask=(part < n_parts)[:, None], other=0.0), axis=0)
    tile = n_whole + other
    band = tile // (n_rows * group)
    width = tl.minimum(n_columns - band * group, group)
    inside = tile - band * n_rows * group
    row = (inside // width) * rows + cell // columns
    column = (band * group + inside % width) * columns + cell % columns
    kept = (row < outputs) & (column < inputs)
    target = row.to(tl.int64) * inputs + column
    if which == 0:
        tl.store(weight_gradient + target, total.to(weight_gradient.dtype.element_ty), mask=kept)
    else:
        tl.store(moment + target, total, mask=kept)


def join_parts(parts: Tensor, weight_gradient: Tensor, moment: Tensor, samples: int, plan: LinearPlan) -> None:
    """parts [part, tile, 2, 128, 128] -> the tiles from plan.whole on, of both results."""
    outputs, inputs = moment.shape
    n_rows, n_columns = -(-outputs // TILE_ROWS), -(-inputs // TILE_COLUMNS)
    n_parts = -(-samples // plan.share)
    most = triton.next_power_of_2(n_parts)
    arguments = (
        parts,
        weight_gradient,
        moment,
        outputs,
        inputs,
        n_rows,
        n_columns,
        plan.whole,
        n_parts,
        plan.group,
        most,
        TILE_ROWS,
        TILE_COLUMNS,
        ROWS_AT_ONCE,
    )
    kind = (parts.device.index, weight_gradient.dtype, plan.group, most, inputs % 16 == 0, inputs == 1)
    grid = (n_rows * n_columns - plan.whole, TILE_ROWS // ROWS_AT_ONCE, 2)
    launch_again("join_parts", kind, join_parts_kernel, grid, arguments, num_warps=4)

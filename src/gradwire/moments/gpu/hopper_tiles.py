"""Step 1, moments: how programs on Hopper go through tiles of a weight and multiply.

One program a multiprocessor. Two warp groups of four multiply, each 64 of a tile's 128 rows, so that one squares and
adds while the other keeps the matrix units busy. The three 64 x 128 float32 sums of a warp group (this sample, all
samples, squares) are 192 of its 240 registers: no larger tile fits. The loads run on across samples and tiles: nothing
drains. Left-over tiles are split over samples, never over positions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gradwire.moments.gpu.hopper_plans import BAND

GROUP = gl.constexpr(BAND)


@gluon.jit
def turns(work):
    """How many whole tiles this program has, and how many parts of others."""
    n_whole, n_rest, n_parts = work[3], work[4], work[5]
    program, n_programs = gl.program_id(0), gl.num_programs(0)
    whole = gl.maximum(n_whole - program + n_programs - 1, 0) // n_programs
    rest = gl.maximum(n_rest * n_parts - program + n_programs - 1, 0) // n_programs
    return whole, rest


@gluon.jit
def segment(index, whole, work):
    """The index-th turn of this program: its tile, the samples [first, last) it adds up, its slot in the workspace.

    Programs that run together are at the same samples, or L2 serves none of them: parts that began anywhere, so that
    all programs ended together, took 1.8 times as long (H200, 3072 x 768).
    """
    _, _, samples, n_whole, n_rest, _, share = work
    n_programs, program = gl.num_programs(0), gl.program_id(0)
    is_whole = index < whole
    slot = (index - whole) * n_programs + program
    tile = gl.where(is_whole, index * n_programs + program, n_whole + slot % gl.maximum(n_rest, 1))
    first = gl.where(is_whole, 0, slot // gl.maximum(n_rest, 1) * share)
    last = gl.where(is_whole, samples, gl.minimum(first + share, samples))
    return tile, first, last, slot


@gluon.jit
def place(tile, work):
    """Row and column of a tile: bands of GROUP columns, so that programs running together share what is in L2."""
    n_rows, n_columns = work[0], work[1]
    band = tile // (n_rows * GROUP)
    width = gl.minimum(n_columns - band * GROUP, GROUP)
    inside = tile - band * n_rows * GROUP
    return inside // width, band * GROUP + inside % width


@gluon.jit
def following(stage, phase, stages: gl.constexpr):
    """The next buffer of the ring; the phase turns with every round."""
    wraps = stage + 1 == stages
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def preceding(stage, stages: gl.constexpr):
    """The buffer before this one. (No variable: Triton 3.6 takes `before = stage` in a loop for a constant.)"""
    return gl.where(stage == 0, stages - 1, stage - 1)


@gluon.jit
def one_sample(accumulator, left, right, barriers, steps, stage, phase, stages: gl.constexpr):
    """G_b^T X_b of one sample: every multiplication is issued before the one before it has ended."""
    full, empty = barriers
    for number in range(steps):
        mbarrier.wait(full.index(stage), phase)
        accumulator = warpgroup_mma(
            left.index(stage).permute((1, 0)), right.index(stage), accumulator, use_acc=number > 0, is_async=True
        )
        accumulator = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[accumulator]))
        mbarrier.arrive(empty.index(preceding(stage, stages)), pred=number > 0)
        stage, phase = following(stage, phase, stages)
    product = warpgroup_mma_wait(0, deps=[accumulator])
    mbarrier.arrive(empty.index(preceding(stage, stages)))
    return product, stage, phase


@gluon.jit
def write_part(parts, slot, half: gl.constexpr, total, squares):
    """A tile of which other programs have the other samples: slot [2, 128, 128], gradient then moment."""
    rows: gl.constexpr = total.shape[0]
    columns: gl.constexpr = total.shape[1]
    row = gl.arange(0, rows, gl.SliceLayout(1, total.type.layout))
    column = gl.arange(0, columns, gl.SliceLayout(0, total.type.layout))
    cells = parts + slot.to(gl.int64) * (4 * rows * columns) + (half * rows + row[:, None]) * columns + column[None, :]
    gl.store(cells, total)
    gl.store(cells + 2 * rows * columns, squares)


@gluon.jit
def write_tile(weight_gradient, moment, outputs, inputs, row, column, half: gl.constexpr, total, squares):
    """A finished tile."""
    rows: gl.constexpr = total.shape[0]
    columns: gl.constexpr = total.shape[1]
    at_row = (2 * row + half) * rows + gl.arange(0, rows, gl.SliceLayout(1, total.type.layout))
    at_column = column * columns + gl.arange(0, columns, gl.SliceLayout(0, total.type.layout))
    inside = (at_row < outputs)[:, None] & (at_column < inputs)[None, :]
    cells = at_row.to(gl.int64)[:, None] * inputs + at_column[None, :]
    gl.store(weight_gradient + cells, total.to(weight_gradient.dtype.element_ty), mask=inside)
    gl.store(moment + cells, squares, mask=inside)


@gluon.jit
def multiply(results, sizes, left, right, barriers, work, steps, half: gl.constexpr, stages: gl.constexpr):
    """A multiplying warp group: for each of its tiles the sum over samples and the sum of squares."""
    rows: gl.constexpr = left.shape[2]
    columns: gl.constexpr = right.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    whole, rest = turns(work)
    stage, phase = 0, 0
    product = gl.zeros([rows, columns], gl.float32, layout)
    for index in range(whole + rest):
        tile, first, last, slot = segment(index, whole, work)
        total = gl.zeros([rows, columns], gl.float32, layout)
        squares = gl.zeros([rows, columns], gl.float32, layout)
        for _ in range(first, last):
            product, stage, phase = one_sample(
                warpgroup_mma_init(product), left, right, barriers, steps, stage, phase, stages
            )
            total += product
            squares += product * product
        if index >= whole:
            write_part(results[2], slot, half, total, squares)
        else:
            row, column = place(tile, work)
            write_tile(results[0], results[1], sizes[0], sizes[1], row, column, half, total, squares)


class Map(NamedTuple):
    """What a compiled kernel's launcher reads of a tensor map; Triton's own class checks for 10 microseconds first."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"

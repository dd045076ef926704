"""Step 1, moments: weight gradient and second moment of a convolution for Hopper's own matrix instructions.

As hopper.py, of which it takes the multiplying half: a convolution's weight is a matrix [O, taps * C], the positions of
a sample are boxes of rows x columns of its plane, and a tile's columns are channels of one tap. A box of the input is
the box of the output moved by the tap; what sticks out at an edge, the padding, tensor maps fill with zeros. A stride s
is a dimension of its own: [B, H, W, C] is read as [B, H/s, s, W/s, s*C].
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gradwire.moments.fused.convolution_plans import Geometry
from gradwire.moments.fused.hopper import Map, following, multiply, place, segment, turns
from gradwire.moments.fused.joining import join_parts_kernel
from gradwire.moments.fused.launching import is_known, launch_again

ROWS, HALF_ROWS = 128, 64
GROUP = 16  # columns of tiles in a band, see hopper.place
# These change from layer to layer: without this, every layer would be compiled on its own.
SIZES = ["outputs", "blocks_high", "blocks_wide", "channels", "taps_wide", "stride", "padding_height", "padding_width"]
SIZES += ["pieces"]
SIZES += [
    "dilation_height",
    "dilation_width",
    "n_rows",
    "n_columns",
    "samples",
    "n_whole",
    "n_rest",
    "n_parts",
    "share",
]


@gluon.jit
def whole_and_rest(number, stride):
    """number = stride * whole + rest, 0 <= rest < stride, for numbers down to -1024 * stride."""
    whole = (number + 1024 * stride) // stride - 1024
    return whole, number - whole * stride


@gluon.jit
def fetch_patches(maps, buffers, barriers, work, shape, stages: gl.constexpr, group: gl.constexpr):
    """The loading warp: for every tile, sample and box of positions two halves of the gradient and the moved input."""
    gradient_map, x_map = maps
    upper, lower, right = buffers
    full, empty = barriers
    blocks_high, blocks_wide, channels, taps_wide, stride, padding, dilation, pieces = shape
    high: gl.constexpr = gradient_map.block_shape[1]
    wide: gl.constexpr = gradient_map.block_shape[2]
    half: gl.constexpr = gradient_map.block_shape[3]
    columns: gl.constexpr = x_map.block_shape[4]
    whole, rest = turns(work)
    stage, phase = 0, 1
    for index in range(whole + rest):
        tile, first, last, _slot = segment(index, whole, work)
        row, column = place(tile, work, group)
        tap = column * columns // channels
        channel = column * columns - tap * channels
        down, down_rest = whole_and_rest(tap // taps_wide * dilation[0] - padding[0], stride)
        aside, aside_rest = whole_and_rest(tap % taps_wide * dilation[1] - padding[1], stride)
        channel += aside_rest * channels
        for sample in range(first, last):
            for piece in range(pieces):  # high * high, high * low, low * high; low parts are `samples` further on
                left = sample + gl.where(piece == 2, work[2], 0)
                moved = sample + gl.where(piece == 1, work[2], 0)
                for block_row in range(blocks_high):
                    for block_column in range(blocks_wide):
                        mbarrier.wait(empty.index(stage), phase)
                        ready = full.index(stage)
                        mbarrier.expect(ready, high * wide * (2 * half + columns) * 2)
                        at, beside, output = block_row * high, block_column * wide, row * 2 * half
                        to_upper = upper.index(stage).reshape([1, high, wide, half])
                        to_lower = lower.index(stage).reshape([1, high, wide, half])
                        to_right = right.index(stage).reshape([1, high, 1, wide, columns])
                        tma.async_copy_global_to_shared(gradient_map, [left, at, beside, output], ready, to_upper)
                        tma.async_copy_global_to_shared(
                            x_map, [moved, at + down, down_rest, beside + aside, channel], ready, to_right
                        )
                        tma.async_copy_global_to_shared(
                            gradient_map, [left, at, beside, output + half], ready, to_lower
                        )
                        stage, phase = following(stage, phase, stages)


@gluon.jit(do_not_specialize=SIZES)
def convolution_grad_moment_kernel(
    gradient_map,
    x_map,
    weight_gradient,
    moment,
    parts,
    outputs,
    inputs,
    blocks_high,
    blocks_wide,
    channels,
    taps_wide,
    stride,
    padding_height,
    padding_width,
    dilation_height,
    dilation_width,
    pieces,
    n_rows,
    n_columns,
    samples,
    n_whole,
    n_rest,
    n_parts,
    share,
    stages: gl.constexpr,
    group: gl.constexpr,
):
    """Sets up the ring of buffers and sends the warps to their work."""
    step: gl.constexpr = gradient_map.block_shape[1] * gradient_map.block_shape[2]
    half: gl.constexpr = gradient_map.block_shape[3]
    columns: gl.constexpr = x_map.block_shape[4]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    upper = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, half], layout)
    lower = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, half], layout)
    right = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, columns], layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    work = (n_rows, n_columns, samples, n_whole, n_rest, n_parts, share)
    padding, dilation = (padding_height, padding_width), (dilation_height, dilation_width)
    shape = (blocks_high, blocks_wide, channels, taps_wide, stride, padding, dilation, pieces)
    barriers, results, sizes = (full, empty), (weight_gradient, moment, parts), (outputs, inputs)
    steps = blocks_high * blocks_wide * pieces
    gl.warp_specialize(
        [
            (multiply, (results, sizes, upper, right, barriers, work, steps, 0, stages, group)),
            (multiply, (results, sizes, lower, right, barriers, work, steps, 1, stages, group)),
            (fetch_patches, ((gradient_map, x_map), (upper, lower, right), barriers, work, shape, stages, group)),
        ],
        [4, 1],
        [240, 24],  # as in hopper.py
    )


@dataclass(frozen=True)
class Boxes:
    """How Hopper's kernel cuts a shape: boxes of high x wide positions, tiles of 128 outputs x `columns` channels.

    programs, whole, share: as in tuning.Plan.
    """

    high: int
    wide: int
    columns: int
    stages: int
    programs: int
    whole: int
    share: int

    @property
    def step(self) -> int:
        return self.high * self.wide


RANK_4 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
RANK_5 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)


def input_map(x: Tensor, geometry: Geometry, boxes: Boxes, copies: int, known: bool) -> Map | TensorDescriptor:
    """What the fetching warp reads a channels_last input by: [B, H/s, s, W/s, s*C]."""
    stride, channels, row = geometry.stride[0], geometry.channels, geometry.width * geometry.channels
    shape = [copies * geometry.samples, geometry.height // stride, stride, geometry.width // stride, stride * channels]
    strides = [geometry.height * row, stride * row, row, stride * channels, 1]
    if known:
        return Map(x, shape, strides)
    return TensorDescriptor(x, shape, strides, [1, boxes.high, 1, boxes.wide, boxes.columns], RANK_5)


def gradient_map(
    gradient: Tensor, geometry: Geometry, boxes: Boxes, copies: int, known: bool
) -> Map | TensorDescriptor:
    """The same for the output gradient: [B, OH, OW, O]."""
    outputs, width = geometry.outputs, geometry.out_width
    shape = [copies * geometry.samples, geometry.out_height, width, outputs]
    strides = [geometry.positions * outputs, width * outputs, outputs, 1]
    if known:
        return Map(gradient, shape, strides)
    return TensorDescriptor(gradient, shape, strides, [1, boxes.high, boxes.wide, HALF_ROWS], RANK_4)


def supports(geometry: Geometry) -> bool:
    """Whether tensor maps can read it: one stride that divides the plane, channels in 128-byte rows."""
    stride = geometry.stride[0]
    planes = geometry.height % stride == 0 and geometry.width % stride == 0 and geometry.stride[1] == stride
    return planes and geometry.groups == 1 and geometry.channels % 64 == 0 and geometry.outputs % 8 == 0


def flattened(geometry: Geometry) -> Geometry:
    """A pointwise convolution's plane as one row: boxes then fit it with fewer zeros."""
    if not geometry.pointwise:
        return geometry
    return replace(geometry, height=1, width=geometry.positions, out_height=1, out_width=geometry.positions)


def launch(
    gradient: Tensor,
    x: Tensor,
    geometry: Geometry,
    boxes: Boxes,
    weight_gradient: Tensor,
    moment: Tensor,
    pieces: int = 1,
) -> None:
    """Channels_last tensors in half precision -> weight_gradient, moment as [O, taps, C] in memory.

    pieces = 3: each tensor is float32 in two halves, [2, B, ...], high parts then low ones.
    """
    copies = 2 if pieces == 3 else 1
    inputs = geometry.taps * geometry.channels
    n_rows, n_columns = -(-geometry.outputs // ROWS), inputs // boxes.columns
    n_rest = n_rows * n_columns - boxes.whole
    n_parts = -(-geometry.samples // boxes.share) if n_rest else 0
    parts = torch.empty(max(n_rest * n_parts, 1), 2, ROWS, boxes.columns, dtype=torch.float32, device=x.device)
    blocks = (-(-geometry.out_height // boxes.high), -(-geometry.out_width // boxes.wide))
    kind = (x.device.index, x.dtype, weight_gradient.dtype, boxes.high, boxes.wide, boxes.columns, boxes.stages)
    known = is_known("convolution_grad_moment", kind)
    arguments = (
        gradient_map(gradient, geometry, boxes, copies, known), input_map(x, geometry, boxes, copies, known), weight_gradient, moment,
        parts, geometry.outputs, inputs, *blocks, geometry.channels, geometry.kernel[1], geometry.stride[0],
        *geometry.padding, *geometry.dilation, pieces, n_rows, n_columns, geometry.samples, boxes.whole, n_rest, n_parts,
        boxes.share, boxes.stages, GROUP,
    )  # fmt: skip
    grid = (min(max(boxes.whole, n_rest * n_parts), boxes.programs), 1, 1)
    launch_again("convolution_grad_moment", kind, convolution_grad_moment_kernel, grid, arguments, num_warps=4)
    if n_rest:
        join(parts, weight_gradient, moment, (geometry.outputs, inputs), (n_rows, n_columns, boxes.whole, n_parts))


def join(
    parts: Tensor, weight_gradient: Tensor, moment: Tensor, shape: tuple[int, int], work: tuple[int, int, int, int]
) -> None:
    """parts [part of the samples, tile, 2, 128, columns] -> the tiles that several programs shared."""
    n_rows, n_columns, whole, n_parts = work
    columns = parts.shape[3]
    most = 1 << (n_parts - 1).bit_length()
    at_once = max(1, min(1024, 8192 // most) // columns)
    arguments = (
        parts, weight_gradient, moment, *shape, n_rows, n_columns, whole, n_parts,
        GROUP, most, ROWS, columns, at_once,
    )  # fmt: skip
    kind = (parts.device.index, weight_gradient.dtype, most, columns)
    grid = (n_rows * n_columns - whole, ROWS // at_once, 2)
    launch_again("convolution_join_parts", kind, join_parts_kernel, grid, arguments, num_warps=4)


def box_of(geometry: Geometry) -> tuple[int, int]:
    """(high, wide): the box that multiplies the fewest zeros; a step costs as much as 24 positions besides."""
    sizes = [(high, step // high) for step in (16, 32, 64) for high in (8, 4, 2, 1)]

    def cost(box: tuple[int, int]) -> int:
        return -(-geometry.out_height // box[0]) * -(-geometry.out_width // box[1]) * (box[0] * box[1] + 24)

    return min(sizes, key=cost)


@lru_cache(maxsize=1024)
def boxes_for(geometry: Geometry, programs: int, pieces: int = 1) -> Boxes:
    """Box, tile and shares of one shape."""
    high, wide = box_of(geometry)
    rows, inputs = -(-geometry.outputs // ROWS), geometry.taps * geometry.channels
    # few tiles are made twice as many; H200: 33 against 37 us for 512 -> 128 pointwise at 28 x 28
    narrow = rows * inputs // 128 < 24 or 100 <= rows * inputs // 64 <= programs
    columns = 64 if narrow or geometry.channels % 128 else 128
    stages = min(16, 196608 // (high * wide * (ROWS + columns) * 2))
    positions = geometry.positions * pieces * columns / 128
    whole, share = spread(rows * (inputs // columns), geometry.samples, positions, programs)
    return Boxes(high, wide, columns, stages, programs, whole, share)


def spread(tiles: int, samples: int, positions: float, programs: int) -> tuple[int, int]:
    """(whole, share): tiles that run whole, and samples in a part of the others; the cheapest by a model."""
    sample_us = 5.4e-3 * positions + 0.3  # H200: one sample of a 128 x 128 tile
    found = [(-(-tiles // programs) * samples * sample_us, tiles, samples)]
    for rounds in range(max(0, tiles // programs - 1), tiles // programs + 1):
        rest = tiles - rounds * programs
        for share in sorted({-(-samples // n_parts) for n_parts in range(2, samples + 1)} if rest else ()):
            total = rest * -(-samples // share)
            join_us = 4.0 + 0.1 * total  # a launch, 128 kB a part written and read
            turns_us = (rounds * samples + -(-total // programs) * share) * sample_us
            found.append((turns_us + join_us, rounds * programs, share))
    return min(found)[1:]

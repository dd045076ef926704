"""Step 1, moments: weight gradient and second moment of a convolution in one pass, by Hopper's own matrix instructions.

One warp fetches by tensor maps, two warp groups of four multiply (hopper_tiles.py). A convolution's weight is a matrix
[O, taps * C], the positions of a sample are boxes of rows x columns of its plane, and a tile's columns are channels of
one tap. A box of the input is the box of the output moved by the tap; what sticks out at an edge, the padding, tensor
maps fill with zeros. A stride s is a dimension of its own: [B, H, W, C] is read as [B, H/s, s, W/s, s*C].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gradwire.compile.launching import is_known, launch_again
from gradwire.moments.gpu.convolution_plans import ConvolutionShape
from gradwire.moments.gpu.hopper_plans import TILE_ROWS, Boxes, TileShares
from gradwire.moments.gpu.hopper_tiles import Map, following, multiply, place, segment, turns
from gradwire.moments.gpu.join_tiles import join_parts

# These change from layer to layer: without this, every layer would be compiled on its own.
SIZES = ["outputs", "blocks_high", "blocks_wide", "channels", "taps_wide", "stride", "padding_height", "padding_width"]
SIZES += ["dilation_height", "dilation_width", "n_rows", "n_columns", "samples", "n_whole", "n_rest"]
SIZES += ["n_parts", "share"]


@gluon.jit
def whole_and_rest(number, stride):
    """number = stride * whole + rest, 0 <= rest < stride, for numbers down to -1024 * stride."""
    whole = (number + 1024 * stride) // stride - 1024
    return whole, number - whole * stride


@gluon.jit
def fetch_patches(
    maps, buffers, barriers, work, shape, stages: gl.constexpr, pieces: gl.constexpr, one_row: gl.constexpr
):
    """The fetching warp: for every tile, sample and box of positions two halves of the gradient and the moved input,
    once both warp groups have left the buffer."""
    gradient_map, x_map = maps
    upper, lower, right = buffers
    full, empty = barriers
    blocks_high, blocks_wide, channels, taps_wide, stride, padding, dilation = shape
    high: gl.constexpr = gradient_map.block_shape[1]
    wide: gl.constexpr = gradient_map.block_shape[2]
    half: gl.constexpr = gradient_map.block_shape[3]
    columns: gl.constexpr = x_map.block_shape[4]
    whole, rest = turns(work)
    stage, phase = 0, 1
    for index in range(whole + rest):
        tile, first, last, _slot = segment(index, whole, work)
        row, column = place(tile, work)
        tap = column * columns // channels
        channel = column * columns - tap * channels
        down, down_rest = whole_and_rest(tap // taps_wide * dilation[0] - padding[0], stride)
        aside, aside_rest = whole_and_rest(tap % taps_wide * dilation[1] - padding[1], stride)
        channel += aside_rest * channels
        for sample in range(first, last):
            for piece in range(pieces):  # high * high, high * low, low * high; low parts are `samples` further on
                left = sample + gl.where(piece == 2, work[2], 0)
                moved = sample + gl.where(piece == 1, work[2], 0)
                for block_row in range(1 if one_row else blocks_high):
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
    gradient_map, x_map, weight_gradient, moment, parts, outputs, inputs, blocks_high, blocks_wide, channels,
    taps_wide, stride, padding_height, padding_width, dilation_height, dilation_width, n_rows, n_columns,
    samples, n_whole, n_rest, n_parts, share,
    stages: gl.constexpr, pieces: gl.constexpr, one_row: gl.constexpr,
):  # fmt: skip
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
    shape = (blocks_high, blocks_wide, channels, taps_wide, stride, padding, dilation)
    maps, buffers = (gradient_map, x_map), (upper, lower, right)
    barriers, results, sizes = (full, empty), (weight_gradient, moment, parts), (outputs, inputs)
    steps = blocks_high * blocks_wide * pieces
    gl.warp_specialize(
        [
            (multiply, (results, sizes, upper, right, barriers, work, steps, 0, stages)),
            (multiply, (results, sizes, lower, right, barriers, work, steps, 1, stages)),
            (fetch_patches, (maps, buffers, barriers, work, shape, stages, pieces, one_row)),
        ],
        [4, 1],
        [240, 24],  # with 240 left for the first group: 128 * (240 + 240 + 24) registers, of the 65,536 there are
    )


RANK_4 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
RANK_5 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)


def supports(geometry: ConvolutionShape) -> bool:
    """Whether tensor maps can read it: one stride that divides the plane, channels in 128-byte rows."""
    stride = geometry.stride[0]
    planes = geometry.height % stride == 0 and geometry.width % stride == 0 and geometry.stride[1] == stride
    return planes and geometry.channels % 64 == 0 and geometry.outputs % 8 == 0


def flattened(geometry: ConvolutionShape) -> ConvolutionShape:
    """A pointwise convolution's plane as one row: boxes then fit it with fewer zeros."""
    if not geometry.pointwise:
        return geometry
    return replace(geometry, height=1, width=geometry.positions, out_height=1, out_width=geometry.positions)


@dataclass(frozen=True)
class Ready:
    """One shape made ready: all of its launches but the tensors."""

    boxes: Boxes
    gradient_map: tuple[list[int], list[int]]
    x_map: tuple[list[int], list[int]]
    shape: tuple[Any, ...]
    constants: tuple[int, bool]  # pieces, and whether a plane is one row of boxes: loops of one turn cost short samples
    work: TileShares

    def run(self, gradient: Tensor, x: Tensor, weight_gradient: Tensor, moment: Tensor) -> None:
        """Half precision, channels side by side -> weight_gradient, moment as [O, taps, C] in memory."""
        boxes, work, inputs = self.boxes, self.work, self.shape[1]
        slots = work.rest * work.parts
        parts = moment
        if slots:
            parts = torch.empty(slots, 2, TILE_ROWS, boxes.columns, dtype=torch.float32, device=x.device)
        constants = (boxes.stages, *self.constants)
        about = (boxes.high, boxes.wide, boxes.columns, inputs % 16 == 0, inputs == 1)
        kind = (x.device.index, x.dtype, weight_gradient.dtype, *about, *constants)
        maps: tuple[Any, ...] = (Map(gradient, *self.gradient_map), Map(x, *self.x_map))
        if not is_known("convolution_grad_moment", kind):
            gradient_box = [1, boxes.high, boxes.wide, TILE_ROWS // 2]
            x_box = [1, boxes.high, 1, boxes.wide, boxes.columns]
            maps = (
                TensorDescriptor(gradient, *self.gradient_map, gradient_box, RANK_4),
                TensorDescriptor(x, *self.x_map, x_box, RANK_5),
            )
        grid = (min(max(work.whole, slots), boxes.programs), 1, 1)
        arguments = (*maps, weight_gradient, moment, parts, *self.shape, *work, *constants)
        launch_again("convolution_grad_moment", kind, convolution_grad_moment_kernel, grid, arguments, num_warps=4)
        if slots:
            at_once = max(1, min(1024, 8192 // triton.next_power_of_2(work.parts)) // boxes.columns)
            join_parts(parts, (weight_gradient, moment), self.shape[:2], work, at_once)


def prepare(geometry: ConvolutionShape, boxes: Boxes, pieces: int) -> Ready:
    """Maps and shares of one shape; pieces = 3: each tensor is float32 in two halves, [2, B, ...], high then low."""
    copies = 2 if pieces == 3 else 1
    stride, channels, outputs = geometry.stride[0], geometry.channels, geometry.outputs
    row, wide = geometry.width * channels, geometry.out_width
    x_shape = [
        copies * geometry.samples,
        geometry.height // stride,
        stride,
        geometry.width // stride,
        stride * channels,
    ]
    x_strides = [geometry.height * row, stride * row, row, stride * channels, 1]
    gradient_shape = [copies * geometry.samples, geometry.out_height, wide, outputs]
    gradient_strides = [geometry.positions * outputs, wide * outputs, outputs, 1]
    inputs = geometry.taps * channels
    rows, columns = -(-outputs // TILE_ROWS), -(-inputs // boxes.columns)
    rest = rows * columns - boxes.whole
    parts = -(-geometry.samples // boxes.share) if rest else 0
    blocks = (-(-geometry.out_height // boxes.high), -(-wide // boxes.wide))
    layer = (channels, geometry.kernel[1], stride, *geometry.padding, *geometry.dilation)
    return Ready(
        boxes=boxes,
        gradient_map=(gradient_shape, gradient_strides),
        x_map=(x_shape, x_strides),
        shape=(outputs, inputs, *blocks, *layer),
        constants=(pieces, blocks[0] == 1),
        work=TileShares(rows, columns, geometry.samples, boxes.whole, rest, parts, boxes.share),
    )

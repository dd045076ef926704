"""Step 1, moments: weight gradient and second moment of a depthwise convolution (one channel a group), in one pass.

A program holds KH*KW sums for a block of channels and reads a part of one sample's positions once; there is nothing for
matrix units to do. The parts, c_b [B, parts, C, KH, KW], are small and joined before they are squared.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.gpu.convolution_join import join_into, partial_results
from gradwire.moments.gpu.convolution_plans import ConvolutionShape, Way
from gradwire.moments.gpu.convolution_tiles import magic_of

SHAPES = ["height", "width", "positions", "out_width", "out_width_magic", "stride_height", "stride_width"]
SHAPES += ["padding_height", "padding_width", "dilation_height", "dilation_width", "parts", "part_positions"]


@triton.jit(do_not_specialize=SHAPES)
def depthwise(
    gradient, x, partial, channels, height, width, positions, out_width, out_width_magic, stride_height,
    stride_width, padding_height, padding_width, dilation_height, dilation_width, parts, part_positions,
    TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """c_b of one sample, one block of channels, one part of positions; channels lie side by side."""
    share = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel_inside = channel < channels
    sample = (share // parts).to(tl.int64)
    left = gradient + sample * positions * channels + channel[None, :]
    right = x + sample * height * width * channels + channel[None, :]
    first = (share % parts) * part_positions
    stop = tl.minimum(first + part_positions, positions)
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    sums = (zero,)
    for _ in tl.static_range(TAPS - 1):
        sums += (zero,)
    for start in tl.range(first, stop, BLOCK_P):
        position = (start + tl.arange(0, BLOCK_P))[:, None]
        inside = (position < stop) & channel_inside[None, :]
        delta = tl.load(left + position * channels, mask=inside, other=0.0).to(tl.float32)
        out_row = tl.umulhi(position.to(tl.uint32), out_width_magic.to(tl.uint32)).to(tl.int32)
        out_row = tl.where(out_width == 1, position, out_row)
        top = out_row * stride_height - padding_height
        side = (position - out_row * out_width) * stride_width - padding_width
        grown = ()
        for tap in tl.static_range(TAPS):
            row = top + (tap // TAPS_WIDE) * dilation_height
            column = side + (tap % TAPS_WIDE) * dilation_width
            within = (row.to(tl.uint32) < height.to(tl.uint32)) & (column.to(tl.uint32) < width.to(tl.uint32))
            pixel = tl.load(right + (row * width + column) * channels, mask=within & inside, other=0.0)
            grown += (sums[tap] + delta * pixel.to(tl.float32),)
        sums = grown
    out = partial + (share.to(tl.int64) * channels + channel) * TAPS
    for tap in tl.static_range(TAPS):
        tl.store(out + tap, tl.sum(sums[tap], 0), mask=channel_inside)


def cut_of(geometry: ConvolutionShape) -> tuple[int, int, int]:
    """(channels a program, warps, parts of a sample's positions): the fastest of a sweep on an H200, by kind of layer.

    Parts fill whole rounds of 16 warps a multiprocessor; each costs as much as a tenth of a round.
    """
    if geometry.positions >= 512:
        block_c, warps = 16 if geometry.positions > 2048 else 32, 4
    else:
        block_c, warps = (64, 2) if geometry.positions >= 128 else (32, 1)
    programs = geometry.samples * math.ceil(geometry.groups / block_c)
    most = max(1, min(16, geometry.positions // 64))
    rounds = {parts: math.ceil(programs * parts * warps / (132 * 16)) for parts in (1, 2, 4, 8, 16) if parts <= most}
    return block_c, warps, min(rounds, key=lambda parts: rounds[parts] / parts + 0.1 * parts)


def prepare(geometry: ConvolutionShape, dtype: torch.dtype) -> Way:
    """Channels side by side -> dW, moment [C, 1, KH, KW]."""
    channels = geometry.groups
    block_c, warps, parts = cut_of(geometry)
    block_p = 32 * warps * (16 // dtype.itemsize) // block_c
    part_positions = math.ceil(math.ceil(geometry.positions / block_p) / parts) * block_p
    constants = (geometry.taps, geometry.kernel[1], block_p, block_c)
    numbers = (
        channels, geometry.height, geometry.width, geometry.positions, geometry.out_width,
        magic_of(geometry.out_width), *geometry.stride, *geometry.padding, *geometry.dilation, parts, part_positions,
        *constants,
    )  # fmt: skip
    grid = (geometry.samples * parts, math.ceil(channels / block_c), 1)
    left = partial_results(geometry, geometry.samples, parts)

    def run(gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
        partial = torch.empty(geometry.samples * parts * left.elements, dtype=torch.float32, device=x.device)
        aligned = gradient.data_ptr() % 16 == 0, x.data_ptr() % 16 == 0
        kind = (x.device.index, dtype, warps, constants, channels % 16 == 0, channels == 1, aligned)
        launch_again("depthwise", kind, depthwise, grid, (gradient, x, partial, *numbers), num_warps=warps)
        join_into(partial, results, left)

    return run

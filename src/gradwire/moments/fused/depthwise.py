"""Step 1, moments: weight gradient and second moment of a depthwise convolution (one channel a group), in one pass.

A program holds KH*KW sums for a block of channels and reads a part of one sample's positions once; there is nothing for
matrix units to do. The parts, c_b [B, parts, C, KH, KW], are small and joined before they are squared.
"""

# Kernels are typed by Triton, not by Python.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined"

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.moments.fused.convolution_kernels import join
from gradwire.moments.fused.convolution_plans import Geometry

SHAPES = ["height", "width", "positions", "out_width", "out_width_magic", "stride_height", "stride_width"]
SHAPES += ["padding_height", "padding_width", "dilation_height", "dilation_width", "parts", "part_positions"]
MOST_TAPS = 25  # as many sums of 8 registers as a thread has room for
BLOCK_C = 64  # 8 threads of 16 bytes in half precision
WARPS = 2


@triton.jit(do_not_specialize=SHAPES)
def depthwise(
    gradient,
    x,
    partial,
    channels,
    height,
    width,
    positions,
    out_width,
    out_width_magic,
    stride_height,
    stride_width,
    padding_height,
    padding_width,
    dilation_height,
    dilation_width,
    parts,
    part_positions,
    TAPS: tl.constexpr,
    TAPS_WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
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


@functools.lru_cache(maxsize=1024)
def parts_of(geometry: Geometry) -> int:
    """Parts of a sample's positions: enough warps to fill the chip, and at least 64 positions each."""
    programs = geometry.samples * math.ceil(geometry.groups / BLOCK_C)
    wanted = math.ceil(132 * 16 / max(1, programs))
    most = max(1, geometry.positions // 64)
    return min(16, 1 << (max(1, min(wanted, most)) - 1).bit_length())


def supports(geometry: Geometry) -> bool:
    """One channel in, one out, and sums that fit the registers."""
    return geometry.channels == 1 and geometry.outputs == 1 and geometry.groups > 1 and geometry.taps <= MOST_TAPS


def launch(
    gradient: Tensor, x: Tensor, geometry: Geometry, dtype: torch.dtype, channels_last: bool,
    parts: int | None = None, warps: int = WARPS, block_p: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dW in dtype, moment in float32) [C, 1, KH, KW]."""
    gradient, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (gradient, x))
    parts = parts or parts_of(geometry)
    vector = 8 if x.element_size() == 2 else 4
    block_p = block_p or max(1, 32 * warps * vector // BLOCK_C)
    part_positions = math.ceil(math.ceil(geometry.positions / block_p) / parts) * block_p
    channels = geometry.groups
    partial = torch.empty(geometry.samples * parts * channels * geometry.taps, dtype=torch.float32, device=x.device)
    magic = (-(-(2**32) // geometry.out_width) + 2**31) % 2**32 - 2**31
    depthwise[(geometry.samples * parts, math.ceil(channels / BLOCK_C))](
        gradient, x, partial, channels, geometry.height, geometry.width, geometry.positions, geometry.out_width, magic,
        *geometry.stride, *geometry.padding, *geometry.dilation, parts, part_positions,
        TAPS=geometry.taps, TAPS_WIDE=geometry.kernel[1], BLOCK_P=block_p, BLOCK_C=BLOCK_C, num_warps=warps,
    )  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (channels, 1, *geometry.kernel)
    total = torch.empty(shape, dtype=dtype, device=x.device, memory_format=layout)
    square = torch.empty(shape, dtype=torch.float32, device=x.device, memory_format=layout)
    elements = channels * geometry.taps
    join[(triton.cdiv(elements, 64),)](
        partial, total, square, elements, geometry.samples, geometry.taps, geometry.kernel[1], 1, 0, elements,
        geometry.taps, geometry.kernel[1], 1,
        RAW_PARTS=parts, CHANNELS_LAST=True, BLOCK_S=64, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return total, square

"""Step 1, moments: puts a convolution's input and output gradient into the layout the kernels read, in one launch.

Channels side by side, and float32 as a sum of two bfloat16: value = high + low, 16 bits of mantissa, which Hopper's
matrix units take from shared memory in any order; tf32 (11 bits) they only take transposed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again

BLOCK_P, BLOCK_C = 32, 64


@triton.jit
def _arrange(source, target, tile, channels, positions, elements, by_channel, by_position, SPLIT: tl.constexpr,
             BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """One tile [positions, channels] of one sample."""
    channel_tiles = tl.cdiv(channels, BLOCK_C)
    position_tiles = tl.cdiv(positions, BLOCK_P)
    channel = (tile % channel_tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tile // channel_tiles
    position = (tile % position_tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
    start = (tile // position_tiles).to(tl.int64) * channels * positions
    inside = (position < positions)[:, None] & (channel < channels)[None, :]
    place = source + start + position[:, None] * by_position + channel[None, :] * by_channel
    value = tl.load(place, mask=inside, other=0.0)
    high = value.to(target.dtype.element_ty)
    place = target + start + position[:, None] * channels + channel[None, :]
    tl.store(place, high, mask=inside)
    if SPLIT:
        tl.store(place + elements, (value - high.to(tl.float32)).to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["gradient_tiles", "gradient_positions", "x_positions"])
def arrange_both(gradient, gradient_target, x, x_target, gradient_tiles, outputs, gradient_positions, gradient_elements,
                 gradient_channel, gradient_position, channels, x_positions, x_elements, x_channel, x_position,
                 SPLIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """The first programs take the gradient, the others the input."""
    tile = tl.program_id(0)
    if tile < gradient_tiles:
        _arrange(gradient, gradient_target, tile, outputs, gradient_positions, gradient_elements, gradient_channel,
                 gradient_position, SPLIT, BLOCK_P, BLOCK_C)  # fmt: skip
    else:
        _arrange(x, x_target, tile - gradient_tiles, channels, x_positions, x_elements, x_channel, x_position, SPLIT,
                 BLOCK_P, BLOCK_C)  # fmt: skip


def strides_of(tensor: Tensor) -> tuple[int, int] | None:
    """(channel, position) strides of a dense tensor; None if it is neither contiguous nor channels_last."""
    if tensor.is_contiguous():
        return tensor.shape[2] * tensor.shape[3], 1
    return (1, tensor.shape[1]) if tensor.is_contiguous(memory_format=torch.channels_last) else None


def arranged(gradient: Tensor, x: Tensor, split: bool) -> tuple[Tensor, Tensor]:
    """Both as [B, positions, channels] in memory; split: [2, B, positions, channels] bfloat16, high parts then low."""
    tensors = [tensor if strides_of(tensor) else tensor.contiguous() for tensor in (gradient, x)]
    dtype = torch.bfloat16 if split else x.dtype
    targets = [torch.empty((1 + split) * one.numel(), dtype=dtype, device=x.device) for one in tensors]
    sizes: list[tuple[int, ...]] = []
    tiles = []
    for one in tensors:
        samples, channels, height, width = one.shape
        by_channel, by_position = strides_of(one) or (0, 0)
        sizes.append((channels, height * width, one.numel(), by_channel, by_position))
        tiles.append(samples * math.ceil(channels / BLOCK_C) * math.ceil(height * width / BLOCK_P))
    arguments = (
        tensors[0], targets[0], tensors[1], targets[1], tiles[0], *sizes[0], *sizes[1], split, BLOCK_P, BLOCK_C,
    )  # fmt: skip
    specialized = (size for both in sizes for size in (both[0], *both[2:]))
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    kind = (x.device.index, x.dtype, split, aligned, tuple((size % 16 == 0, size == 1) for size in specialized))
    launch_again("arrange_both", kind, arrange_both, (sum(tiles), 1, 1), arguments, num_warps=4)
    return targets[0], targets[1]

"""Step 1, moments: a convolution's weight gradient and its second moment from one pass over (x, output gradient).

    c_b[o, c, kh, kw] = sum over positions of g[b, o, oh, ow] x[b, c, oh*stride + kh*dilation - padding, ...]
    dW = sum_b c_b        moment = sum_b c_b^2        both [O, C/groups, KH, KW]

Three ways: depthwise.py for one channel a group; convolution_hopper.py for multiples of 64 channels on Hopper;
convolution_tiles.py for everything else.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.moments.gpu import convolution_tiles, depthwise
from gradwire.moments.gpu.chip import HALVES, chip
from gradwire.moments.gpu.convolution_join import join_into, partial_results
from gradwire.moments.gpu.convolution_operands import arranged
from gradwire.moments.gpu.convolution_plans import ConvolutionShape, Way, plan_for
from gradwire.moments.gpu.hopper_plans import convolution_boxes

Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]  # stride, padding, dilation by height and width; groups


def shape_of(
    gradient_shape: torch.Size, x_shape: torch.Size, weight_shape: torch.Size, numbers: Numbers
) -> ConvolutionShape:
    """The sizes of one call."""
    groups = numbers[6]
    return ConvolutionShape(
        samples=x_shape[0],
        groups=groups,
        channels=weight_shape[1],
        outputs=weight_shape[0] // groups,
        height=x_shape[2],
        width=x_shape[3],
        out_height=gradient_shape[2],
        out_width=gradient_shape[3],
        kernel=(weight_shape[2], weight_shape[3]),
        stride=numbers[:2],
        padding=numbers[2:4],
        dilation=numbers[4:6],
    )


def as_kernels_read(gradient: Tensor, x: Tensor, split: bool) -> tuple[Tensor, Tensor]:
    """Channels side by side, on 16 bytes; the tensors themselves if they are so already."""
    ready = all(
        one.is_contiguous(memory_format=torch.channels_last) and one.data_ptr() % 16 == 0 for one in (gradient, x)
    )
    return (gradient, x) if ready and not split else arranged(gradient, x, split)


def takes_hopper(geometry: ConvolutionShape, device: torch.device, half: bool) -> bool:
    """Whether tensor maps are the fastest way.

    H200: up to 16 positions the boxes are too small (46 against 34 us for 512 -> 512 at 4 x 4), and 64 outputs of 64
    channels fill half a tile (88 against 78 us at 56 x 56).
    """
    if chip(device)[0] != 9 or geometry.positions <= 16:
        return False
    from gradwire.moments.gpu import convolution_hopper

    few = half and geometry.outputs <= 64 and geometry.channels == 64 and geometry.taps > 1
    return convolution_hopper.supports(geometry) and not (few and geometry.positions > 2048)


def hopper_way(geometry: ConvolutionShape, device: torch.device, in_place: bool, pieces: int) -> Way:
    """By tensor maps; a weight laid out otherwise is written from a copy."""
    from gradwire.moments.gpu import convolution_hopper

    flat = convolution_hopper.flattened(geometry)
    ready = convolution_hopper.prepare(flat, convolution_boxes(flat, chip(device)[1], pieces), pieces)
    left = partial_results(geometry, splits=1, parts=0)

    def run(gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
        gradient, x = as_kernels_read(gradient, x, pieces == 3)
        if in_place:
            return ready.run(gradient, x, *results)
        both = torch.empty(2, geometry.elements, dtype=torch.float32, device=x.device)
        ready.run(gradient, x, both[0], both[1])
        join_into(both, results, left)

    return run


@functools.lru_cache(maxsize=4096)
def way_for(
    gradient_shape: torch.Size,
    x_shape: torch.Size,
    weight_shape: torch.Size,
    numbers: Numbers,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
) -> Way:
    """How one shape is run."""
    geometry = shape_of(gradient_shape, x_shape, weight_shape, numbers)
    half = dtype in HALVES
    in_place = channels_last or geometry.taps == 1
    rounded = not half and device.type == "cuda"  # float32 comes here only where tf32 is allowed (choice.py)
    if geometry.groups > 1:
        by_channel = depthwise.prepare(geometry, dtype)
        return lambda gradient, x, results: by_channel(*as_kernels_read(gradient, x, False), results)
    if geometry.channels < 4:
        return convolution_tiles.prepare_few_channels(geometry, plan_for(geometry, not half), rounded)
    if takes_hopper(geometry, device, half):
        return hopper_way(geometry, device, in_place, 1 if half else 3)
    # float32 as two bfloat16 also where Hopper's own kernel is not taken: 16-byte loads for its matrix units
    split = not half and chip(device)[0] == 9 and geometry.channels % 64 == 0
    plan = plan_for(geometry, wide=not half and not split)
    tiles = convolution_tiles.prepare(geometry, plan, in_place, 3 if split else 1, rounded and not split)
    return lambda gradient, x, results: tiles.run(*as_kernels_read(gradient, x, split), results)


def launch(
    gradient: Tensor,
    x: Tensor,
    weight_shape: torch.Size,
    geometry: dict[str, Any],
    dtype: torch.dtype,
    channels_last: bool,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dW in dtype, moment in float32), both laid out as the weight: channels_last or contiguous.

    gradient [B, O, OH, OW], x [B, C, H, W], weight [O, C/groups, KH, KW]; one group or depthwise.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    total = torch.empty(weight_shape, dtype=dtype, device=x.device, memory_format=layout)
    if place is None or not place.is_contiguous(memory_format=layout):
        place = torch.empty(weight_shape, dtype=torch.float32, device=x.device, memory_format=layout)
    results = (total, place)
    if gradient.numel() == 0 or x.numel() == 0:
        return results[0].zero_(), results[1].zero_()
    numbers = (*geometry["stride"], *geometry["padding"], *geometry["dilation"], geometry["groups"])
    way = way_for(gradient.shape, x.shape, weight_shape, numbers, x.dtype, x.device, channels_last)
    way(gradient, x, results)
    return results

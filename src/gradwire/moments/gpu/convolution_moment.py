"""Step 1, moments: a convolution's weight gradient and its second moment from one pass over (x, output gradient).

    c_b[o, c, kh, kw] = sum over positions of g[b, o, oh, ow] x[b, c, oh*stride + kh*dilation - padding, ...]
    dW = sum_b c_b        moment = sum_b c_b^2        both [O, C/groups, KH, KW]

Three ways: depthwise.py for one channel a group; convolution_hopper.py for multiples of 64 channels on Hopper;
convolution_tiles.py for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.moments.gpu import convolution_tiles, depthwise
from gradwire.moments.gpu.chip import HALVES, chip
from gradwire.moments.gpu.convolution_join import Shares, join_into, layout_of
from gradwire.moments.gpu.convolution_operands import arranged
from gradwire.moments.gpu.convolution_plans import ConvolutionShape
from gradwire.moments.gpu.hopper_plans import convolution_boxes

MOST_WAYS = 4096  # shapes remembered
Way: TypeAlias = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], None]
_ways: dict[Hashable, Way] = {}


def shape_of(gradient: Tensor, x: Tensor, weight_shape: torch.Size, geometry: dict[str, Any]) -> ConvolutionShape:
    """The sizes of one call; geometry: aten.convolution's own numbers."""
    stride, padding, dilation = ((geometry[name][0], geometry[name][1]) for name in ("stride", "padding", "dilation"))
    return ConvolutionShape(
        samples=x.shape[0],
        groups=geometry["groups"],
        channels=weight_shape[1],
        outputs=weight_shape[0] // geometry["groups"],
        height=x.shape[2],
        width=x.shape[3],
        out_height=gradient.shape[2],
        out_width=gradient.shape[3],
        kernel=(weight_shape[2], weight_shape[3]),
        stride=stride,
        padding=padding,
        dilation=dilation,
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
    layout, shares = layout_of(geometry), Shares(1, 0, geometry.elements)

    def run(gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
        gradient, x = as_kernels_read(gradient, x, pieces == 3)
        if in_place:
            return ready.run(gradient, x, *results)
        both = torch.empty(2, geometry.elements, dtype=torch.float32, device=x.device)
        ready.run(gradient, x, both[0], both[1])
        join_into(both, results, geometry.kernel, layout, shares)

    return run


def way_for(
    geometry: ConvolutionShape, dtype: torch.dtype, device: torch.device, channels_last: bool, tf32: bool
) -> Way:
    """How one shape is run."""
    half = dtype in HALVES
    in_place = channels_last or geometry.taps == 1
    if geometry.groups > 1:
        return lambda gradient, x, results: depthwise.launch(*as_kernels_read(gradient, x, False), geometry, results)
    if geometry.channels < 4:
        return lambda gradient, x, results: convolution_tiles.launch_few_channels(gradient, x, geometry, results, tf32)
    if takes_hopper(geometry, device, half) and (half or tf32):
        return hopper_way(geometry, device, in_place, 1 if half else 3)
    # float32 as two bfloat16 also where Hopper's own kernel is not taken: 16-byte loads for its matrix units
    split = not half and tf32 and chip(device)[0] == 9 and geometry.channels % 64 == 0
    return lambda gradient, x, results: convolution_tiles.launch(
        *as_kernels_read(gradient, x, split), geometry, results, in_place, 3 if split else 1, tf32
    )


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
    tf32 = bool(torch.backends.cudnn.allow_tf32)  # what torch itself may do with a float32 convolution
    numbers = (*weight_shape, *geometry["stride"], *geometry["padding"], *geometry["dilation"], geometry["groups"])
    key = (x.shape, gradient.shape, x.dtype, x.device, numbers, channels_last, tf32)
    way = _ways.get(key)
    if way is None:
        shape = shape_of(gradient, x, weight_shape, geometry)
        if len(_ways) >= MOST_WAYS:
            _ways.clear()
        way = _ways[key] = way_for(shape, x.dtype, x.device, channels_last, tf32)
    way(gradient, x, results)
    return results

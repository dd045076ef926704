"""Step 1, moments: a convolution's weight gradient and its second moment from one pass over (x, output gradient).

    c_b[o, c, kh, kw] = sum over positions of g[b, o, oh, ow] x[b, c, oh*stride + kh*dilation - padding, ...]
    dW = sum_b c_b        moment = sum_b c_b^2        both [O, C/groups, KH, KW]

Three ways: depthwise.py for one channel a group; convolution_hopper.py for multiples of 64 channels on Hopper; the kernel
of convolution_kernels.py (launched by tiled.py) for everything else.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from gradwire.moments.fused import depthwise, tiled
from gradwire.moments.fused.arranging import arranged
from gradwire.moments.fused.convolution_plans import Geometry

HALVES = (torch.bfloat16, torch.float16)
MOST_POSITIONS = 1 << 24  # where positions * out_width < 2**32 still holds, and 32-bit offsets within a sample


def geometry_of(
    gradient: Tensor,
    x: Tensor,
    weight_shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Geometry:
    """The sizes of one call."""
    return Geometry(
        samples=x.shape[0],
        groups=groups,
        channels=weight_shape[1],
        outputs=weight_shape[0] // groups,
        height=x.shape[2],
        width=x.shape[3],
        out_height=gradient.shape[2],
        out_width=gradient.shape[3],
        kernel=(weight_shape[2], weight_shape[3]),
        stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1]),
        dilation=(dilation[0], dilation[1]),
    )


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """(major capability, multiprocessors); a CPU, which only Triton's interpreter uses, counts as a small old chip."""
    if device.type != "cuda":
        return 8, 2
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def refusal(gradient: Tensor, x: Tensor, weight_shape: list[int], groups: int) -> str | None:
    """Why no fused kernel can take these tensors; None if one can."""
    if x.ndim != 4 or gradient.ndim != 4 or len(weight_shape) != 4:
        return f"expected x, gradient, weight of 4 dimensions, got {x.ndim}, {gradient.ndim}, {len(weight_shape)}"
    fits = gradient.shape[:2] == (x.shape[0], weight_shape[0]) and x.shape[1] == weight_shape[1] * groups
    if not fits:
        shapes = f"{list(gradient.shape)}, {list(x.shape)}, {list(weight_shape)}, groups={groups}"
        return f"expected gradient [B, O, ...], x [B, C, ...] and weight [O, C/groups, KH, KW], got {shapes}"
    if gradient.dtype != x.dtype or x.dtype not in (*HALVES, torch.float32):
        return f"expected one dtype of bfloat16, float16, float32, got {gradient.dtype} and {x.dtype}"
    if gradient.device != x.device or (x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        return f"expected one CUDA device, got {gradient.device} and {x.device}"
    if max(x[0].numel(), gradient[0].numel()) >= 1 << 31 or gradient.shape[2] * gradient.shape[3] > MOST_POSITIONS:
        return f"expected fewer than 2**31 elements and {MOST_POSITIONS} positions a sample, got {list(gradient.shape)}"
    return None


def supported(gradient: Tensor, x: Tensor, weight_shape: list[int], groups: int) -> bool:
    """Whether a fused kernel can take these tensors."""
    return refusal(gradient, x, weight_shape, groups) is None


def worth_it(gradient: Tensor, x: Tensor, weight_shape: list[int], groups: int) -> bool:
    """Whether it was measured to pay: one group or depthwise, matrix units for the dtype.

    Groups of several channels were not measured; float32 without tf32 has no matrix units.
    """
    if not supported(gradient, x, weight_shape, groups) or chip(x.device)[0] < 8:
        return False
    taps = weight_shape[2] * weight_shape[3]
    if groups > 1:
        return weight_shape[1] == 1 and weight_shape[0] == groups and taps <= depthwise.MOST_TAPS
    return x.dtype in HALVES or tf32_allowed()


def tf32_allowed() -> bool:
    """What torch itself may do with a float32 convolution."""
    return bool(torch.backends.cudnn.allow_tf32)


def as_kernels_read(gradient: Tensor, x: Tensor, split: bool) -> tuple[Tensor, Tensor]:
    """Channels side by side, on 16 bytes; the tensors themselves if they are so already."""
    ready = all(
        one.is_contiguous(memory_format=torch.channels_last) and one.data_ptr() % 16 == 0 for one in (gradient, x)
    )
    return (gradient, x) if ready and not split else arranged(gradient, x, split)


def takes_hopper(geometry: Geometry, device: torch.device, half: bool) -> bool:
    """H200: up to 16 positions the loads are too small to fetch by tensor map (34 against 46 us for 512 -> 512 at 4 x 4),
    and 64 outputs of 64 channels fill half a tile (78 against 88 us at 56 x 56)."""
    if chip(device)[0] != 9 or geometry.positions <= 16:
        return False
    from gradwire.moments.fused import convolution_hopper

    few = half and geometry.outputs <= 64 and geometry.channels == 64 and geometry.taps > 1
    return convolution_hopper.supports(geometry) and not (few and geometry.positions > 2048)


def on_hopper(
    gradient: Tensor, x: Tensor, geometry: Geometry, results: tuple[Tensor, Tensor], in_place: bool, pieces: int
) -> None:
    """By tensor maps; a weight laid out otherwise is written from a copy."""
    from gradwire.moments.fused import convolution_hopper

    flat = convolution_hopper.flattened(geometry)
    boxes = convolution_hopper.boxes_for(flat, chip(x.device)[1], pieces)
    if in_place:
        return convolution_hopper.launch(gradient, x, flat, boxes, *results, pieces)
    both = torch.empty(2, geometry.elements, dtype=torch.float32, device=x.device)
    convolution_hopper.launch(gradient, x, flat, boxes, both[0], both[1], pieces)
    tiled.join_into(both, results, geometry.kernel, tiled.source_of(geometry), tiled.Shares(1, 0, geometry.elements))


def launch(
    gradient: Tensor,
    x: Tensor,
    weight_shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """(dW in dtype, moment in float32), both laid out as the weight: channels_last or contiguous."""
    geometry = geometry_of(gradient, x, weight_shape, stride, padding, dilation, groups)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    results = (
        torch.empty(weight_shape, dtype=dtype, device=x.device, memory_format=layout),
        torch.empty(weight_shape, dtype=torch.float32, device=x.device, memory_format=layout),
    )
    if gradient.numel() == 0 or x.numel() == 0:
        return results[0].zero_(), results[1].zero_()
    half = x.dtype in HALVES
    if depthwise.supports(geometry):
        depthwise.launch(*as_kernels_read(gradient, x, False), geometry, results)
        return results
    in_place = channels_last or geometry.taps == 1
    hopper = takes_hopper(geometry, x.device, half) and (half or tf32_allowed())
    if hopper:
        on_hopper(*as_kernels_read(gradient, x, not half), geometry, results, in_place, 1 if half else 3)
        return results
    # float32 as two bfloat16 also where Hopper's own kernel is not taken: 16-byte loads for its matrix units
    split = not half and chip(x.device)[0] == 9 and tf32_allowed() and geometry.channels % 64 == 0 and groups == 1
    if geometry.channels < 4 and groups == 1:
        tiled.launch_few_channels(gradient, x, geometry, results, tf32_allowed())
    else:
        operands = as_kernels_read(gradient, x, split)
        tiled.launch(*operands, geometry, results, in_place, 3 if split else 1, tf32_allowed())
    return results


@torch.library.custom_op("gradwire::convolution_grad_moment", mutates_args=())
def convolution_grad_moment(
    gradient: Tensor,
    x: Tensor,
    weight_shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """gradient [B, O, OH, OW], x [B, C, H, W] -> dW in dtype, sum_b c_b^2 in float32, both [O, C/groups, KH, KW]."""
    reason = refusal(gradient, x, weight_shape, groups)
    if reason is not None:
        raise ValueError(f"convolution_grad_moment: {reason}; ask supported(...) first")
    return launch(gradient, x, weight_shape, stride, padding, dilation, groups, dtype, channels_last)


@convolution_grad_moment.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    weight_shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """The shapes and layouts, for torch.compile."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    total = torch.empty(weight_shape, dtype=dtype, device=x.device, memory_format=layout)
    return total, torch.empty(weight_shape, dtype=torch.float32, device=x.device, memory_format=layout)

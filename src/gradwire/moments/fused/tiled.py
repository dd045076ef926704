"""Step 1, moments: launches the convolution kernels that run wherever Triton does (convolution_kernels.py)."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.fused import convolution_kernels as kernels
from gradwire.moments.fused.convolution_join import Shares, Source, join_into, source_of
from gradwire.moments.fused.convolution_plans import Geometry, Plan, plan_for


def widen(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry, Source]:
    """An input of fewer than four channels with four, pairs of pixels taken as one where the stride allows it."""
    x = F.pad(x, (0, 0, 0, 0, 0, 4 - geometry.channels)).contiguous(memory_format=torch.channels_last)
    rows, columns = geometry.kernel
    if not geometry.paired:
        wide = replace(geometry, channels=4)
        return x, wide, source_of(wide)
    shift = geometry.padding[1] % 2
    pairs = (columns + shift + 1) // 2
    wide = replace(
        geometry,
        channels=8,
        width=geometry.width // 2,
        kernel=(rows, pairs),
        stride=(geometry.stride[0], 1),
        padding=(geometry.padding[0], (geometry.padding[1] + shift) // 2),
    )
    return x, wide, Source(rows * pairs * 8, pairs * 8, 4, shift)


def strides_of(geometry: Geometry, positions_last: bool) -> tuple[int, ...]:
    """(sample, position, output) of the gradient, (sample, row, column, channel) of the input, dense tensors both."""
    outputs, channels = geometry.groups * geometry.outputs, geometry.groups * geometry.channels
    positions, pixels, width = geometry.positions, geometry.height * geometry.width, geometry.width
    if positions_last:
        return outputs * positions, 1, positions, channels * pixels, width, 1, pixels
    return outputs * positions, outputs, 1, channels * pixels, width * channels, channels, 1


def sizes_of(geometry: Geometry, plan: Plan, splits: int, out_split: int) -> tuple[int, ...]:
    """The kernel's integers from `samples` to `out_split`, in its order."""
    steps = -(-geometry.positions // plan.block_k)
    return (
        geometry.samples,
        geometry.positions,
        geometry.height,
        geometry.width,
        geometry.out_width,
        magic_of(geometry.out_width),
        geometry.outputs,
        geometry.channels,
        geometry.taps,
        geometry.kernel[1],
        *geometry.stride,
        *geometry.padding,
        *geometry.dilation,
        splits,
        max(1, plan.parts),
        -(-steps // max(1, plan.parts)) * plan.block_k,
        *plan.tiles(geometry),
        out_split,
    )


def magic_of(divisor: int) -> int:
    """ceil(2**32 / divisor), by which the kernels divide, as the signed number of the same bits (0 for 1)."""
    return (-(-(2**32) // divisor) + 2**31) % 2**32 - 2**31


def looks(number: int) -> tuple[bool, bool, bool]:
    """What Triton compiles an integer by."""
    return number % 16 == 0, number == 1, number >= 2**31


@dataclass(frozen=True)
class Call:
    """One shape made ready: everything of a launch but the tensors."""

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    kind: Hashable
    shares: Shares
    direct: bool  # results go where they belong, there is nothing to join


@functools.lru_cache(maxsize=1024)
def prepare(geometry: Geometry, plan: Plan, in_place: bool, pieces: int, precision: str, rounded: bool,
            positions_last: bool) -> Call:  # fmt: skip
    """The launch of one shape by one plan; in_place: the partial results lie as the weight does."""
    splits = geometry.samples * plan.parts if plan.parts else plan.splits
    strides = strides_of(geometry, positions_last)
    low = (strides[0] * geometry.samples, strides[3] * geometry.samples) if pieces > 1 else (0, 0)
    elements = geometry.elements
    integers = (*sizes_of(geometry, plan, splits, elements if plan.parts else 2 * elements), *strides, *low)
    constants = (
        geometry.pointwise, positions_last, plan.flat, plan.parts > 0, plan.by_dot, plan.steps, plan.tail,
        plan.block_o, plan.block_i, plan.block_k, precision, rounded, pieces,
    )  # fmt: skip
    looked_at = (geometry.outputs, geometry.channels, *integers[-10:])
    kind = (constants, plan.warps, plan.stages, tuple(map(looks, looked_at)))
    output_tiles, column_tiles = plan.tiles(geometry)
    grid = (splits * output_tiles * column_tiles, geometry.groups, 1)
    direct = in_place and splits == 1 and not plan.parts
    return Call(grid, (*integers, *constants), kind, Shares(splits, plan.parts, elements), direct)


def run(call: Call, plan: Plan, gradient: Tensor, x: Tensor, total: Tensor, square: Tensor) -> None:
    """Launches grad_moment."""
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (gradient, x, total, square))
    kind = (x.device.index, x.dtype, total.dtype, aligned, call.kind)
    arguments = (gradient, x, total, square, *call.arguments)
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    launch_again("convolution_tiles", kind, kernels.grad_moment, call.grid, arguments, **options)


def launch(
    gradient: Tensor,
    x: Tensor,
    geometry: Geometry,
    results: tuple[Tensor, Tensor],
    in_place: bool,
    pieces: int,
    tf32: bool,
    plan: Plan | None = None,
    positions_last: bool = False,
    source: Source | None = None,
    kernel: tuple[int, int] | None = None,
) -> None:
    """Dense tensors, channels (or positions) last, -> results; kernel, source: if the geometry is not the weight's."""
    wide = x.dtype == torch.float32
    plan = plan or plan_for(geometry, wide)
    rounded = wide and tf32 and x.is_cuda
    call = prepare(geometry, plan, in_place, pieces, "tf32" if tf32 else "ieee", rounded, positions_last)
    if call.direct:
        return run(call, plan, gradient, x, *results)
    elements = call.shares.elements
    planes = call.shares.splits * (1 if plan.parts else 2)
    partial = torch.empty(planes * elements, dtype=torch.float32, device=x.device)
    run(call, plan, gradient, x, partial, partial if plan.parts else partial[elements:])
    join_into(partial, results, kernel or geometry.kernel, source or source_of(geometry), call.shares)


def launch_few_channels(
    gradient: Tensor,
    x: Tensor,
    geometry: Geometry,
    results: tuple[Tensor, Tensor],
    tf32: bool,
    plan: Plan | None = None,
) -> None:
    """A network's first layer: its input is padded to four channels."""
    plan = plan or plan_for(geometry, x.dtype == torch.float32)
    x, wide, source = widen(x, geometry)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    launch(gradient, x, wide, results, False, 1, tf32, plan, source=source, kernel=geometry.kernel)

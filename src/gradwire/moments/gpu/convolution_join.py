"""Step 1, moments: adds up what the programs of a fused convolution found, in a fixed order, as the weight lies."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.gpu.convolution_plans import ConvolutionShape, power_of_two

JOIN_ELEMENTS = 4096
JOIN_SHAPES = ["elements", "splits", "taps_wide", "taps", "channels", "shift", "from_plane"]
JOIN_SHAPES += ["from_output", "from_row", "from_column"]


@triton.jit(do_not_specialize=JOIN_SHAPES)
def join(
    partial, total_out, square_out, elements, splits, taps, taps_wide, channels, shift, from_plane, from_output,
    from_row, from_column,
    RAW_PARTS: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of all programs of grad_moment, in a fixed order, into the weight's own memory layout.

    partial is [splits, 2, elements], sums and sums of squares, or (RAW_PARTS > 0) [splits, RAW_PARTS, elements]: c_b in
    parts over positions, which are joined before they are squared. from_*: how far apart its outputs, rows of taps and
    taps lie; shift: taps of a row that the weight does not have.
    """
    element = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = element < elements
    output = element // (taps * channels)
    rest = element - output * (taps * channels)
    if CHANNELS_LAST:
        tap = rest // channels
        channel = rest - tap * channels
    else:
        channel = rest // taps
        tap = rest - channel * taps
    tap_row = tap // taps_wide
    source = output * from_output + tap_row * from_row + (tap - tap_row * taps_wide + shift) * from_column + channel
    total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    square = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    planes: tl.constexpr = RAW_PARTS if RAW_PARTS > 0 else 2
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        keep = (split < splits)[:, None] & inside[None, :]
        where = partial + (split.to(tl.int64) * planes * from_plane)[:, None] + source[None, :]
        value = tl.load(where, mask=keep, other=0.0)
        if RAW_PARTS > 0:
            for part in tl.static_range(1, RAW_PARTS):
                value += tl.load(where + part * from_plane, mask=keep, other=0.0)
            square += value * value
        else:
            square += tl.load(where + from_plane, mask=keep, other=0.0)
        total += value
    tl.store(total_out + element, tl.sum(total, 0).to(total_out.dtype.element_ty), mask=inside)
    tl.store(square_out + element, tl.sum(square, 0), mask=inside)


@dataclass(frozen=True)
class PartialLayout:
    """Where the join finds an element: distances in the partial results; shift: taps a row has before the first."""

    output: int
    row: int
    column: int
    shift: int = 0


@dataclass(frozen=True)
class Shares:
    """What there is to join: ranges of samples (or samples in so many parts), and elements in each."""

    splits: int
    parts: int
    elements: int


def layout_of(geometry: ConvolutionShape) -> PartialLayout:
    """Partial results as [output, tap, channel]."""
    columns = geometry.kernel[1] * geometry.channels
    return PartialLayout(geometry.kernel[0] * columns, columns, geometry.channels)


def join_into(
    partial: Tensor, results: tuple[Tensor, Tensor], kernel: tuple[int, int], layout: PartialLayout, shares: Shares
) -> None:
    """Adds up the partial results of all programs, in the weight's layout."""
    total, square = results
    splits = shares.splits // max(1, shares.parts)
    block_s = min(64, power_of_two(splits))
    block_n = max(32, min(1024, JOIN_ELEMENTS // block_s))
    channels_last = total.shape[1] == 1 or total.stride(1) == 1
    arguments = (
        partial, total, square, total.numel(), splits, kernel[0] * kernel[1], kernel[1], total.shape[1], layout.shift,
        shares.elements, layout.output, layout.row, layout.column, shares.parts, channels_last, block_s, block_n,
    )  # fmt: skip
    kind = (total.device.index, total.dtype, shares.parts, channels_last, block_s, block_n)
    launch_again("convolution_join", kind, join, (-(-total.numel() // block_n), 1, 1), arguments, num_warps=4)

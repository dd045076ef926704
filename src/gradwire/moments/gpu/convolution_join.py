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
    """The sums of all programs, in a fixed order, into the weight's own memory layout; see PartialResults."""
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
class PartialResults:
    """What the programs leave to join: [splits, 2, elements], sums and sums of squares over ranges of samples.

    Or (parts > 0) [samples, parts, elements]: c_b in parts over positions, which are joined before they are squared.
    output, row, column: how far apart outputs, rows of taps and taps lie; shift: taps that a row has before the first.
    """

    splits: int
    parts: int
    elements: int
    output: int
    row: int
    column: int
    shift: int = 0


def partial_results(shape: ConvolutionShape, splits: int, parts: int) -> PartialResults:
    """As [output, tap, channel]."""
    row = shape.kernel[1] * shape.channels
    return PartialResults(splits, parts, shape.elements, shape.kernel[0] * row, row, shape.channels)


def join_into(partial: Tensor, results: tuple[Tensor, Tensor], about: PartialResults) -> None:
    """Adds up the partial results of all programs, in the weight's layout."""
    total, square = results
    channels, taps_high, taps_wide = total.shape[1:]
    block_s = min(64, power_of_two(about.splits))
    block_n = max(32, min(1024, JOIN_ELEMENTS // block_s))
    channels_last = channels == 1 or total.stride(1) == 1
    arguments = (
        partial, total, square, total.numel(), about.splits, taps_high * taps_wide, taps_wide, channels, about.shift,
        about.elements, about.output, about.row, about.column, about.parts, channels_last, block_s, block_n,
    )  # fmt: skip
    kind = (total.device.index, total.dtype, about.parts, channels_last, block_s, block_n)
    launch_again("convolution_join", kind, join, (-(-total.numel() // block_n), 1, 1), arguments, num_warps=4)

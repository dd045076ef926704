"""Step 1, moments: a convolution's weight gradient and its second moment wherever Triton runs: kernel and launcher.

Sample b's gradient is a matrix product over output positions t: c_b[o, i] = sum_t g[b, t, o] patch[b, t, i] with
i = (tap, channel). A program forms one tile of c_b in registers, adds it to the gradient's tile and its square to the
moment's, and goes on to the next sample. Patches are never written: their addresses are computed (an implicit product).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.gpu.convolution_join import PartialResults, join_into, partial_results
from gradwire.moments.gpu.convolution_plans import ConvolutionShape, TilePlan, Way

# These change from layer to layer: without this, every layer would be compiled on its own.
SIZES = ["samples", "positions", "height", "width", "out_width", "out_width_magic", "taps", "taps_wide"]
SIZES += ["stride_height", "stride_width", "padding_height", "padding_width", "dilation_height", "dilation_width"]
SIZES += ["splits", "parts", "part_positions", "output_tiles", "column_tiles"]


@triton.jit
def _rounded(values):
    """To tf32, to nearest: the matrix units cut bits off, which makes every square 0.14 % too small (H200)."""
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _operands(left, right, first, stop, place, geometry, POINTWISE: tl.constexpr, FLAT: tl.constexpr, K: tl.constexpr,
              ROUND: tl.constexpr):  # fmt: skip
    """(g^T, patches) of positions first .. first + K of one sample, zero from stop on; left, right: where it begins."""
    outputs, outputs_inside, channels, columns_inside, tap_rows, tap_columns = place
    height, width, out_width, magic, stride_height, stride_width, gradient_position, x_row, x_column = geometry
    position = first + tl.arange(0, K)[:, None]
    inside = position < stop
    deltas = tl.load(left + position * gradient_position + outputs, mask=inside & outputs_inside, other=0.0)
    if POINTWISE:
        patches = tl.load(right + position * x_column + channels, mask=inside & columns_inside, other=0.0)
    else:
        # position // out_width without a division: exact while positions * out_width < 2**32
        out_row = tl.umulhi(position.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
        out_row = tl.where(out_width == 1, position, out_row)
        row = out_row * stride_height + tap_rows
        column = (position - out_row * out_width) * stride_width + tap_columns
        # as unsigned numbers, negative rows and columns are beyond the end too
        within = (row.to(tl.uint32) < height.to(tl.uint32)) & (column.to(tl.uint32) < width.to(tl.uint32))
        # a pixel is FLAT elements: said so, Triton knows how many of them lie together
        pixel = (row * width + column) * FLAT if FLAT > 0 else row * x_row + column * x_column
        patches = tl.load(right + pixel + channels, mask=within & inside & columns_inside, other=0.0)
    if ROUND:
        deltas, patches = _rounded(deltas), _rounded(patches)
    return tl.trans(deltas), patches


@triton.jit
def _contribution(left, right, low, first, stop, place, geometry, POINTWISE: tl.constexpr, FLAT: tl.constexpr,
                  STEPS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
                  ROUND: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """A tile of c_b, of one sample's positions first to stop; STEPS > 0: they are that many blocks, unrolled.

    With three PIECES an operand is high + low, `low` elements apart: high*high + high*low + low*high.
    """
    tile = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for piece in tl.static_range(PIECES):
        deltas_from = left + low[0] if piece == 2 else left
        patches_from = right + low[1] if piece == 1 else right
        if STEPS > 0:
            for step in tl.static_range(STEPS):
                deltas, patches = _operands(deltas_from, patches_from, step * BLOCK_K, stop, place, geometry,
                                            POINTWISE, FLAT, BLOCK_K, ROUND)  # fmt: skip
                tile = tl.dot(deltas, patches, tile, input_precision="tf32")
        else:
            for start in tl.range(first, stop, BLOCK_K):
                deltas, patches = _operands(deltas_from, patches_from, start, stop, place, geometry,
                                            POINTWISE, FLAT, BLOCK_K, ROUND)  # fmt: skip
                tile = tl.dot(deltas, patches, tile, input_precision="tf32")
    return tile


@triton.jit
def _columns(column_tile, taps, channels, FLAT: tl.constexpr, BLOCK_I: tl.constexpr):
    """(tap, channel, which exist) of a tile's columns: a block of one tap's channels, or FLAT channels of several."""
    block = tl.arange(0, BLOCK_I)
    if FLAT > 0:
        column = column_tile * BLOCK_I + block
        tap = column // FLAT
        channel = column % FLAT
        inside = tap < taps
    else:
        blocks = tl.cdiv(channels, BLOCK_I)
        tap = column_tile // blocks
        channel = (column_tile % blocks) * BLOCK_I + block
        inside = channel < channels
    return tap, channel, inside


@triton.jit(do_not_specialize=SIZES)
def grad_moment(
    gradient, x, total_out, square_out,
    samples, positions, height, width, out_width, out_width_magic, outputs, channels, taps, taps_wide,
    stride_height, stride_width, padding_height, padding_width, dilation_height, dilation_width,
    splits, parts, part_positions, output_tiles, column_tiles, out_split,
    gradient_sample, gradient_position, x_sample, x_row, x_column, gradient_low, x_low,
    POINTWISE: tl.constexpr, FLAT: tl.constexpr, RAW: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, ROUND: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_O, BLOCK_I] of the sums over one range of samples, or (RAW) of c_b over one part of positions.

    With STEPS the loop over samples is pipelined as one.
    """
    program = tl.program_id(0)
    column_tile = program % column_tiles
    program = program // column_tiles
    output_tile = program % output_tiles
    split = program // output_tiles

    output = output_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    output_inside = output < outputs
    tap, channel, column_inside = _columns(column_tile, taps, channels, FLAT, BLOCK_I)
    tap_row = (tap // taps_wide) * dilation_height - padding_height
    tap_column = (tap % taps_wide) * dilation_width - padding_width
    if FLAT > 0:
        tap_row, tap_column = tap_row[None, :], tap_column[None, :]
    place = (output[None, :], output_inside[None, :], channel[None, :], column_inside[None, :], tap_row, tap_column)
    geometry = (height, width, out_width, out_width_magic, stride_height, stride_width, gradient_position, x_row,
                x_column)  # fmt: skip
    low = (gradient_low, x_low)

    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    square = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    if RAW:
        sample = (split // parts).to(tl.int64)
        first = (split % parts) * part_positions
        stop = tl.minimum(first + part_positions, positions)
        left, right = gradient + sample * gradient_sample, x + sample * x_sample
        total = _contribution(left, right, low, first, stop, place, geometry, POINTWISE, FLAT, 0,
                              BLOCK_O, BLOCK_I, BLOCK_K, ROUND, PIECES)  # fmt: skip
    else:
        first_sample = (split * samples) // splits
        left = gradient + first_sample.to(tl.int64) * gradient_sample
        right = x + first_sample.to(tl.int64) * x_sample
        for _ in tl.range(first_sample, ((split + 1) * samples) // splits):
            tile = _contribution(left, right, low, 0, positions, place, geometry, POINTWISE, FLAT, STEPS,
                                 BLOCK_O, BLOCK_I, BLOCK_K, ROUND, PIECES)  # fmt: skip
            total += tile
            square += tile * tile
            left += gradient_sample
            right += x_sample
    spot = (tap * channels + channel)[None, :] + output[:, None] * (taps * channels)
    keep = output_inside[:, None] & column_inside[None, :]
    base = split.to(tl.int64) * out_split
    tl.store(total_out + base + spot, total.to(total_out.dtype.element_ty), mask=keep)
    if not RAW:
        tl.store(square_out + base + spot, square, mask=keep)


def sizes_of(shape: ConvolutionShape, plan: TilePlan, splits: int, pieces: int) -> tuple[int, ...]:
    """The kernel's integers from `samples` to `x_low`, in its order; channels lie side by side."""
    steps = -(-shape.positions // plan.block_k)
    gradient_sample, x_sample = shape.positions * shape.outputs, shape.height * shape.width * shape.channels
    return (
        *(shape.samples, shape.positions, shape.height, shape.width, shape.out_width, magic_of(shape.out_width)),
        *(shape.outputs, shape.channels, shape.taps, shape.kernel[1], *shape.stride, *shape.padding, *shape.dilation),
        *(splits, max(1, plan.parts), -(-steps // max(1, plan.parts)) * plan.block_k, *plan.tiles(shape)),
        shape.elements if plan.parts else 2 * shape.elements,
        *(gradient_sample, shape.outputs, x_sample, shape.width * shape.channels, shape.channels),
        *((gradient_sample * shape.samples, x_sample * shape.samples) if pieces > 1 else (0, 0)),
    )


def magic_of(divisor: int) -> int:
    """ceil(2**32 / divisor), by which the kernels divide, as the signed number of the same bits (0 for 1)."""
    return (-(-(2**32) // divisor) + 2**31) % 2**32 - 2**31


def looks(number: int) -> tuple[bool, bool, bool]:
    """What Triton compiles an integer by."""
    return number % 16 == 0, number == 1, number >= 2**31


@dataclass(frozen=True)
class TileLaunch:
    """One shape made ready: everything of a launch but the tensors."""

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    stages: int
    kind: Hashable
    left: PartialResults
    direct: bool  # results go where they belong, there is nothing to join

    def run(self, gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
        """Dense tensors, channels last, one group -> results."""
        if self.direct:
            return self._launch(gradient, x, *results)
        left = self.left
        partial = torch.empty(left.splits * (left.parts or 2) * left.elements, dtype=torch.float32, device=x.device)
        self._launch(gradient, x, partial, partial if left.parts else partial[left.elements :])
        join_into(partial, results, left)

    def _launch(self, gradient: Tensor, x: Tensor, total: Tensor, square: Tensor) -> None:
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (gradient, x, total, square))
        kind = (x.device.index, x.dtype, total.dtype, aligned, self.kind)
        arguments = (gradient, x, total, square, *self.arguments)
        options = {"num_warps": 4, "num_stages": self.stages}
        launch_again("convolution_tiles", kind, grad_moment, self.grid, arguments, **options)


def prepare(shape: ConvolutionShape, plan: TilePlan, in_place: bool, pieces: int, rounded: bool) -> TileLaunch:
    """The launch of one shape by one plan; in_place: the partial results lie as the weight does."""
    splits = shape.samples * plan.parts if plan.parts else plan.splits
    integers = sizes_of(shape, plan, splits, pieces)
    constants = (
        *(shape.pointwise, plan.flat, plan.parts > 0, plan.steps, plan.block_o, plan.block_i, plan.block_k),
        *(rounded, pieces),
    )
    looked_at = (shape.outputs, shape.channels, *integers[-8:])
    output_tiles, column_tiles = plan.tiles(shape)
    return TileLaunch(
        grid=(splits * output_tiles * column_tiles, 1, 1),
        arguments=(*integers, *constants),
        stages=plan.stages,
        kind=(constants, plan.stages, tuple(map(looks, looked_at))),
        left=partial_results(shape, shape.samples if plan.parts else splits, plan.parts),
        direct=in_place and splits == 1 and not plan.parts,
    )


def widened(shape: ConvolutionShape) -> tuple[ConvolutionShape, int]:
    """(shape with four channels, or pairs of pixels as one where the stride allows it; taps before a row's first)."""
    if not shape.paired:
        return replace(shape, channels=4), 0
    shift = shape.padding[1] % 2
    wide = replace(
        shape,
        channels=8,
        width=shape.width // 2,
        kernel=(shape.kernel[0], (shape.kernel[1] + shift + 1) // 2),
        stride=(shape.stride[0], 1),
        padding=(shape.padding[0], (shape.padding[1] + shift) // 2),
    )
    return wide, shift


def prepare_few_channels(shape: ConvolutionShape, plan: TilePlan, rounded: bool) -> Way:
    """A network's first layer: its input is padded to four channels."""
    wide, shift = widened(shape)
    ready = prepare(wide, plan, False, 1, rounded)
    ready = replace(ready, left=replace(ready.left, column=4, shift=shift))

    def run(gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
        x = F.pad(x, (0, 0, 0, 0, 0, 4 - shape.channels)).contiguous(memory_format=torch.channels_last)
        ready.run(gradient.contiguous(memory_format=torch.channels_last), x, results)

    return run

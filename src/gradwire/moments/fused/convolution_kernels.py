"""Step 1, moments: the Triton kernels of a convolution's weight gradient and its second moment in one pass.

Sample b's gradient is a matrix product over output positions t: c_b[o, i] = sum_t g[b, t, o] patch[b, t, i] with
i = (tap, channel). A program forms one tile of c_b in registers, adds it to the gradient's tile and its square to the
moment's, and goes on to the next sample. Patches are never written: their addresses are computed (an implicit product).
"""

# Kernels are typed by Triton, not by Python.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

# These change from layer to layer: without this, every layer would be compiled on its own.
SHAPES = ["samples", "positions", "height", "width", "out_width_magic", "out_width", "taps", "taps_wide", "splits"]
SHAPES += ["stride_height", "stride_width", "padding_height", "padding_width", "dilation_height", "dilation_width"]
SHAPES += ["parts", "part_positions", "output_tiles", "column_tiles"]


@triton.jit
def _rounded(values):
    """To tf32, to nearest: the matrix units cut bits off, which makes every square 0.14 % too small (H200)."""
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _operands(
    left,
    right,
    first,
    stop,
    place,
    geometry,
    POINTWISE: tl.constexpr,
    LAST: tl.constexpr,
    FLAT: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
):
    """(g^T, patches) of positions first .. first + K of one sample, zero from stop on; left, right: where it begins."""
    outputs, outputs_inside, channels, columns_inside, tap_rows, tap_columns = place
    height, width, out_width, magic, stride_height, stride_width, gradient_position, x_row, x_column = geometry
    position = first + tl.arange(0, K)
    position = position[None, :] if LAST else position[:, None]
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
        keep = within & inside & columns_inside
        # a pixel is FLAT elements: said so, Triton knows how many of them lie together
        pixel = (row * width + column) * FLAT if FLAT > 0 else row * x_row + column * x_column
        patches = tl.load(right + pixel + channels, mask=keep, other=0.0)
    if ROUND:
        deltas, patches = _rounded(deltas), _rounded(patches)
    if LAST:
        patches = tl.trans(patches)
    else:
        deltas = tl.trans(deltas)
    return deltas, patches


@triton.jit(do_not_specialize=SHAPES)
def grad_moment(
    gradient,
    x,
    total_out,
    square_out,
    samples,
    positions,
    height,
    width,
    out_width,
    out_width_magic,
    outputs_per_group,
    channels_per_group,
    taps,
    taps_wide,
    stride_height,
    stride_width,
    padding_height,
    padding_width,
    dilation_height,
    dilation_width,
    splits,
    parts,
    part_positions,
    output_tiles,
    column_tiles,
    out_split,
    gradient_sample,
    gradient_position,
    gradient_output,
    x_sample,
    x_row,
    x_column,
    x_channel,
    gradient_low,
    x_low,
    POINTWISE: tl.constexpr,
    POSITIONS_LAST: tl.constexpr,
    FLAT: tl.constexpr,
    RAW: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    STEPS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    PIECES: tl.constexpr,
):
    """One tile [BLOCK_O, BLOCK_I] of the sums over one range of samples, or (RAW) of c_b over one part of positions.

    Columns are (tap, channels of a block), or (FLAT, for few channels) the pair flattened to FLAT channels a tap. With
    STEPS the positions of a sample are that many blocks and TAIL, and the loop over samples is pipelined as one. With
    three PIECES an operand is high + low, *_low elements apart, and the product high*high + high*low + low*high.
    """
    program = tl.program_id(0)
    column_tile = program % column_tiles
    program = program // column_tiles
    output_tile = program % output_tiles
    split = program // output_tiles
    group = tl.program_id(1)

    output = output_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    block = tl.arange(0, BLOCK_I)
    if FLAT > 0:
        column = column_tile * BLOCK_I + block
        tap = column // FLAT
        channel = column % FLAT
        column_inside = tap < taps
    else:
        blocks = tl.cdiv(channels_per_group, BLOCK_I)
        tap = column_tile // blocks
        channel = (column_tile % blocks) * BLOCK_I + block
        column_inside = channel < channels_per_group
    tap_row = (tap // taps_wide) * dilation_height - padding_height
    tap_column = (tap % taps_wide) * dilation_width - padding_width
    output_offset = (group * outputs_per_group + output) * gradient_output
    # FLAT is for one group: a sum with a number unknown to Triton would hide what lies together
    channel_offset = channel if FLAT > 0 else (group * channels_per_group + channel) * x_channel
    output_inside = output < outputs_per_group
    if POSITIONS_LAST:
        output_offset, output_in = output_offset[:, None], output_inside[:, None]
        channel_offset, column_in = channel_offset[:, None], column_inside[:, None]
        if FLAT > 0:
            tap_row, tap_column = tap_row[:, None], tap_column[:, None]
    else:
        output_offset, output_in = output_offset[None, :], output_inside[None, :]
        channel_offset, column_in = channel_offset[None, :], column_inside[None, :]
        if FLAT > 0:
            tap_row, tap_column = tap_row[None, :], tap_column[None, :]

    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    square = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    if RAW:
        first_sample = split // parts
        past_sample = first_sample + 1
        first = (split % parts) * part_positions
        stop = tl.minimum(first + part_positions, positions)
    else:
        first_sample = (split * samples) // splits
        past_sample = ((split + 1) * samples) // splits
        first = 0
        stop = positions
    place = (output_offset, output_in, channel_offset, column_in, tap_row, tap_column)
    geometry = (
        height,
        width,
        out_width,
        out_width_magic,
        stride_height,
        stride_width,
        gradient_position,
        x_row,
        x_column,
    )
    left = gradient + first_sample.to(tl.int64) * gradient_sample
    right = x + first_sample.to(tl.int64) * x_sample
    if RAW:
        for piece in tl.static_range(PIECES):
            deltas_from = left + gradient_low if piece == 2 else left
            patches_from = right + x_low if piece == 1 else right
            for start in tl.range(first, stop, BLOCK_K):
                deltas, patches = _operands(
                    deltas_from,
                    patches_from,
                    start,
                    stop,
                    place,
                    geometry,
                    POINTWISE,
                    POSITIONS_LAST,
                    FLAT,
                    BLOCK_K,
                    ROUND,
                )
                total = tl.dot(deltas, patches, total, input_precision=PRECISION)
    else:
        for _ in tl.range(first_sample, past_sample):
            tile = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            for piece in tl.static_range(PIECES):
                deltas_from = left + gradient_low if piece == 2 else left
                patches_from = right + x_low if piece == 1 else right
                if STEPS > 0:
                    for step in tl.static_range(STEPS):
                        deltas, patches = _operands(
                            deltas_from, patches_from, step * BLOCK_K, stop, place, geometry,
                            POINTWISE, POSITIONS_LAST, FLAT, BLOCK_K, ROUND,
                        )  # fmt: skip
                        tile = tl.dot(deltas, patches, tile, input_precision=PRECISION)
                        if SUM_BY_DOT:
                            total = tl.dot(deltas, patches, total, input_precision=PRECISION)
                    if TAIL > 0:
                        deltas, patches = _operands(
                            deltas_from, patches_from, STEPS * BLOCK_K, stop, place, geometry,
                            POINTWISE, POSITIONS_LAST, FLAT, TAIL, ROUND,
                        )  # fmt: skip
                        tile = tl.dot(deltas, patches, tile, input_precision=PRECISION)
                else:
                    for start in tl.range(first, stop, BLOCK_K):
                        deltas, patches = _operands(
                            deltas_from, patches_from, start, stop, place, geometry,
                            POINTWISE, POSITIONS_LAST, FLAT, BLOCK_K, ROUND,
                        )  # fmt: skip
                        tile = tl.dot(deltas, patches, tile, input_precision=PRECISION)
            if not SUM_BY_DOT:
                total += tile
            square += tile * tile
            left += gradient_sample
            right += x_sample
    columns = taps * channels_per_group
    spot = (tap * channels_per_group + channel)[None, :] + (group * outputs_per_group + output)[:, None] * columns
    keep = output_inside[:, None] & column_inside[None, :]
    base = split.to(tl.int64) * out_split
    tl.store(total_out + base + spot, total.to(total_out.dtype.element_ty), mask=keep)
    if not RAW:
        tl.store(square_out + base + spot, square, mask=keep)

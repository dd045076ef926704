"""Step 1, moments: the sums of normalizations on a GPU: gradient and input are read once, in their own dtype.

A program sums a part of one sample's rows or positions in registers; the parts, [B, parts, k, D], are added by torch in
an order that is always the same. The bound is memory: 8 bytes an element in float32, 4 in half precision.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments import normalization_sums as definition
from gradwire.moments.gpu.chip import chip

TILE = 2048  # elements that 4 warps load at once of each operand
ROUNDS = 6  # programs a multiprocessor should have; more would only make more parts
CHANNELS = 16  # of one program that finishes


@triton.jit(do_not_specialize=["n_rows", "n_parts", "part_rows"])
def row_sums_kernel(
    gradient, x, partial, g_sample, g_row, x_sample, x_row, size, n_rows, n_parts, part_rows, eps,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """sum G xhat and sum G over one part of one sample's rows; whole rows are held, so xhat is exact."""
    program = tl.program_id(0)
    sample, first = (program // n_parts).to(tl.int64), (program % n_parts) * part_rows
    stop = tl.minimum(first + part_rows, n_rows)
    column = tl.arange(0, SIZE)[None, :]
    left, right = gradient + sample * g_sample + column, x + sample * x_sample + column
    weight, bias = tl.zeros((ROWS, SIZE), tl.float32), tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(first, stop, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < stop) & (column < size)
        delta = tl.load(left + row.to(tl.int64) * g_row, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(right + row.to(tl.int64) * x_row, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            value = tl.where(inside, value - (tl.sum(value, 1) / size)[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        weight += delta * (value * scale[:, None])
        bias += delta
    out = partial + program.to(tl.int64) * 2 * size + tl.arange(0, SIZE)
    kept = tl.arange(0, SIZE) < size
    tl.store(out, tl.sum(weight, 0), mask=kept)
    tl.store(out + size, tl.sum(bias, 0), mask=kept)


@triton.jit(do_not_specialize=["positions", "n_parts", "part_positions"])
def channel_sums_kernel(
    gradient, x, partial, g_sample, g_channel, g_position, x_sample, x_channel, x_position, channels, positions,
    n_parts, part_positions,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """sum y, sum y^2, sum G, sum G y over one part of one sample's positions; y: x less the sample's first position.

    So the cancellation in a variance is below n roundings: the square of that distance from the mean is one of the
    squares.
    """
    program = tl.program_id(0)
    sample, first = (program // n_parts).to(tl.int64), (program % n_parts) * part_positions
    stop = tl.minimum(first + part_positions, positions)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    left = gradient + sample * g_sample + channel[None, :].to(tl.int64) * g_channel
    right = x + sample * x_sample + channel[None, :].to(tl.int64) * x_channel
    shift = tl.load(right, mask=known[None, :], other=0.0).to(tl.float32)
    zero = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    total, squares, deltas, products = zero, zero, zero, zero
    for start in tl.range(first, stop, POSITIONS):
        position = (start + tl.arange(0, POSITIONS))[:, None]
        inside = (position < stop) & known[None, :]
        delta = tl.load(left + position.to(tl.int64) * g_position, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(right + position.to(tl.int64) * x_position, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - shift, 0.0)
        total += value
        squares += value * value
        deltas += delta
        products += delta * value
    out = partial + program.to(tl.int64) * 4 * channels + channel
    tl.store(out, tl.sum(total, 0), mask=known)
    tl.store(out + channels, tl.sum(squares, 0), mask=known)
    tl.store(out + 2 * channels, tl.sum(deltas, 0), mask=known)
    tl.store(out + 3 * channels, tl.sum(products, 0), mask=known)


@triton.jit(do_not_specialize=["samples", "positions"])
def batch_sums_kernel(
    raw, x, weight, x_sample, x_channel, channels, samples, positions, eps,
    SAMPLES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """weight [B, C] from the sums of channel_sums_kernel, raw [B, 4, C], and the statistics of the whole batch."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    known = channel < channels
    shifts, count = x + channel.to(tl.int64) * x_channel, positions.to(tl.float32)
    base = tl.load(shifts, mask=known, other=0.0).to(tl.float32)
    base += tl.load(raw + channel, mask=known, other=0.0) / count
    distances, squares = tl.zeros((SAMPLES, CHANNELS), tl.float32), tl.zeros((SAMPLES, CHANNELS), tl.float32)
    for start in tl.range(0, samples, SAMPLES):
        sample = (start + tl.arange(0, SAMPLES))[:, None].to(tl.int64)
        inside, at = (sample < samples) & known, raw + sample * 4 * channels + channel
        mean = tl.load(at, mask=inside, other=0.0) / count
        spread = tl.maximum(tl.load(at + channels, mask=inside, other=0.0) / count - mean * mean, 0.0)
        mean += tl.load(shifts + sample * x_sample, mask=inside, other=0.0).to(tl.float32) - base
        distances += tl.where(inside, mean, 0.0)
        squares += tl.where(inside, spread + mean * mean, 0.0)
    distance = (tl.sum(distances, 0) / samples)[None, :]
    variance = tl.maximum((tl.sum(squares, 0) / samples)[None, :] - distance * distance, 0.0)
    scale = tl.rsqrt(variance + eps)
    for start in tl.range(0, samples, SAMPLES):
        sample = (start + tl.arange(0, SAMPLES))[:, None].to(tl.int64)
        inside, at = (sample < samples) & known, raw + sample * 4 * channels + channel
        shift = tl.load(shifts + sample * x_sample, mask=inside, other=0.0).to(tl.float32)
        deltas = tl.load(at + 2 * channels, mask=inside, other=0.0)
        products = tl.load(at + 3 * channels, mask=inside, other=0.0)
        found = (products + deltas * ((shift - base) - distance)) * scale
        tl.store(weight + sample * channels + channel, found, mask=inside)


def parts_of(n_programs: int, length: int, least: int, device: torch.device, rounds: int = ROUNDS) -> tuple[int, int]:
    """(parts, their length) of a sample's rows or positions: enough programs for the chip, none below `least`."""
    wanted = -(-rounds * chip(device)[1] // n_programs)
    each = -(-length // max(1, min(wanted, length // least)))
    each = -(-each // least) * least
    return -(-length // each), each


def kind_of(tensors: tuple[Tensor, ...], numbers: tuple[int, ...], constants: tuple[int, ...]) -> tuple[object, ...]:
    """All that the machine code depends on."""
    about = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    return tensors[0].device.index, about, tuple((n % 16 == 0, n == 1, n >= 2**31) for n in numbers), constants


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def row_sums(gradient: Tensor, x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """definition.normalized_sums; rows up to definition.WIDEST."""
    gradient, x = (one if one.stride(2) == 1 else one.contiguous() for one in (gradient, x))
    samples, n_rows, size = x.shape
    width = power_of_two(size)
    rows = max(1, min(power_of_two(n_rows), TILE // width))
    parts, part_rows = parts_of(samples, n_rows, rows, x.device)
    partial = torch.empty(samples, parts, 2, size, dtype=torch.float32, device=x.device)
    numbers = (*gradient.stride()[:2], *x.stride()[:2], size)
    constants = (int(centered), rows, width)
    arguments = (gradient, x, partial, *numbers, n_rows, parts, part_rows, float(eps), bool(centered), rows, width)
    kind = kind_of((gradient, x), numbers, constants)
    warps = max(1, min(16, rows * width // 512))
    launch_again("row_sums", kind, row_sums_kernel, (samples * parts, 1, 1), arguments, num_warps=warps)
    joined = partial.sum(1) if parts > 1 else partial[:, 0]
    return joined[:, 0], joined[:, 1]


def tile_of(x: Tensor, size: int = TILE, widest: int = 128) -> tuple[int, int]:
    """(positions, channels) of a tile: as many as possible of those that lie side by side; size: in half precision."""
    _, channels, positions = x.shape
    elements = 2 * size // x.element_size()
    if x.stride(1) == 1 and (x.stride(2) != 1 or positions < channels):
        wide = min(power_of_two(channels), widest)
        return max(1, min(power_of_two(positions), elements // wide)), wide
    long = min(power_of_two(positions), 512)
    return long, max(1, min(power_of_two(channels), elements // long))


def raw_sums(gradient: Tensor, x: Tensor) -> Tensor:
    """[B, 4, C]: the sums of channel_sums_kernel; gradient, x [B, C, n], any strides."""
    samples, channels, positions = x.shape
    tile = tile_of(x)
    blocks = math.ceil(channels / tile[1])
    parts, part_positions = parts_of(samples * blocks, positions, tile[0], x.device)
    partial = torch.empty(samples, parts, 4, channels, dtype=torch.float32, device=x.device)
    numbers = (*gradient.stride(), *x.stride(), channels)
    arguments = (gradient, x, partial, *numbers, positions, parts, part_positions, *tile)
    warps = max(1, min(8, tile[0] * tile[1] // 256))
    grid = (samples * parts, blocks, 1)
    kind = kind_of((gradient, x), numbers, tile)
    launch_again("channel_sums", kind, channel_sums_kernel, grid, arguments, num_warps=warps)
    return partial.sum(1) if parts > 1 else partial[:, 0]


def channel_parts(gradient: Tensor, x: Tensor) -> definition.ChannelParts:
    """gradient, x [B, C, n]; a few more small operations, for the layers whose statistics are not the batch's."""
    total, squares, deltas, products = raw_sums(gradient, x).unbind(1)
    distance = total / x.shape[2]
    spread = (squares - total * distance).clamp_(min=0)
    return definition.ChannelParts(x[:, :, 0].float() + distance, spread, deltas, products - deltas * distance)


def batch_sums(gradient: Tensor, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """definition.channel_sums with the batch's own statistics, made on the way: x is not read once more for them."""
    samples, channels, positions = x.shape
    raw = raw_sums(gradient, x)
    weight = torch.empty(samples, channels, dtype=torch.float32, device=x.device)
    constants = (min(32, power_of_two(samples)), CHANNELS)
    numbers = (*x.stride()[:2], channels)
    arguments = (raw, x, weight, *numbers, samples, positions, float(eps), *constants)
    grid = (math.ceil(channels / CHANNELS), 1, 1)
    launch_again("batch_sums", kind_of((raw, x), numbers, constants), batch_sums_kernel, grid, arguments, num_warps=4)
    return weight, raw[:, 2]

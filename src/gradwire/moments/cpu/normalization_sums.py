"""Step 1, moments: the sums of normalization_sums.py on a CPU, as machine code: one pass, xhat stays in the registers.

Each sample is summed by one thread in one order, so that the result does not depend on how many there are. Compiled
with leave to reassociate: a sum over a row is one of vectors, which only rounds otherwise. LayerNorm of [32, 64, 128]:
0.06 ms, where torch's operations with their temporaries take 0.24 (EPYC with AVX-512, one thread); BatchNorm of
[32, 64, 28, 28] 0.19 and 2.7, channels_last 0.5 and 6.0. (Four rows at once are 15 % faster, and four positions twice
as fast below 64 channels, slower above: 2 % of a step at most.) Arrays are indexed and not sliced: slices handed to
a function cost as much as a row of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gradwire.compile.threads import SMALL, shared
from gradwire.moments import normalization_sums as definition

Array = np.ndarray[Any, Any]
Quartet = tuple[Array, Array, Array, Array]  # g, x [rows, D], and the sums of weight and bias [B, D]
PLANES = 4  # sums of a plane
ZERO = np.float32(0)

compiled = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False, fastmath={"reassoc", "contract"})


@compiled
def _add_row(sample: int, at: int, row: int, arrays: Quartet, eps: np.float32, centered: bool) -> None:
    """Row `at` of g and `row` of x into the sums of their sample."""
    g, x, weight, bias = arrays
    mean, squares, size = ZERO, ZERO, x.shape[1]
    if centered:
        for i in range(size):
            mean += x[row, i]
        mean /= np.float32(size)
    for i in range(size):
        squares += (x[row, i] - mean) * (x[row, i] - mean)
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        weight[sample, i] += g[at, i] * ((x[row, i] - mean) * scale)
        bias[sample, i] += g[at, i]


@compiled
def _rows(
    begin: int,
    end: int,
    arrays: Quartet,
    g_steps: tuple[int, int],
    x_steps: tuple[int, int],
    n_rows: int,
    eps: np.float32,
    centered: bool,
) -> None:
    """Samples begin to end; steps: rows from one sample to the next, and from one position to the next."""
    weight, bias = arrays[2], arrays[3]
    for sample in range(begin, end):
        weight[sample] = 0
        bias[sample] = 0
        at, row = sample * g_steps[0], sample * x_steps[0]
        for _ in range(n_rows):
            _add_row(sample, at, row, arrays, eps, centered)
            at += g_steps[1]
            row += x_steps[1]


@compiled
def _plane(x: Array, g: Array) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Mean of x, sum (x - mean)^2, sum G, sum G (x - mean) of one sample's channel."""
    mean, squares, total, product = ZERO, ZERO, ZERO, ZERO
    for i in range(x.size):
        mean += x[i]
    mean /= np.float32(x.size)
    for i in range(x.size):
        squares += (x[i] - mean) * (x[i] - mean)
        total += g[i]
        product += g[i] * (x[i] - mean)
    return mean, squares, total, product


@compiled
def _planes(begin: int, end: int, g: Array, x: Array, size: int, parts: Array) -> None:
    """Planes begin to end of [B, C, n], flat; parts [4, B * C]."""
    for plane in range(begin, end):
        at = plane * size
        mean, squares, total, product = _plane(x[at : at + size], g[at : at + size])
        parts[0, plane], parts[1, plane], parts[2, plane], parts[3, plane] = mean, squares, total, product


@compiled
def _add_position(sample: int, shift: int, row: int, g: Array, x: Array, sums: Array) -> None:
    """A row of g and x [rows, C] into the sums [4, B, C] of its sample; x less its row `shift`."""
    for i in range(x.shape[1]):
        moved = x[row, i] - x[shift, i]
        sums[0, sample, i] += moved
        sums[1, sample, i] += moved * moved
        sums[2, sample, i] += g[row, i]
        sums[3, sample, i] += g[row, i] * moved


@compiled
def _samples(begin: int, end: int, g: Array, x: Array, size: int, parts: Array) -> None:
    """Samples begin to end of g, x [B * n, C]: channels side by side; parts [4, B, C].

    All sums are of x less the sample's first position, which keeps the cancellation below n roundings: the square of
    its distance from the mean is one of the squares.
    """
    count = np.float32(size)
    for sample in range(begin, end):
        first = sample * size
        parts[:, sample] = 0
        for row in range(first, first + size):
            _add_position(sample, first, row, g, x, parts)
        for i in range(x.shape[1]):
            mean = parts[0, sample, i] / count
            parts[0, sample, i] = mean + x[first, i]
            parts[1, sample, i] = max(ZERO, parts[1, sample, i] - count * mean * mean)
            parts[3, sample, i] -= parts[2, sample, i] * mean


def in_threads(count: int, numel: int, function: Callable[..., Any], *args: object) -> None:
    """function(begin, end, *args) over parts of `count` samples or planes, of `numel` elements in all."""
    step = -(-count // max(1, min(torch.get_num_threads(), count, numel // SMALL)))
    shared([(begin, min(count, begin + step)) for begin in range(0, count, step)], function, *args)


def matrix(tensor: Tensor) -> tuple[Array, tuple[int, int]]:
    """[B, T, D] as a float32 matrix of rows, and how many rows lie between samples and between positions."""
    tensor = tensor.detach().float()
    samples, positions, size = tensor.shape
    if not tensor.is_contiguous() and tensor.transpose(0, 1).is_contiguous():
        return tensor.transpose(0, 1).reshape(-1, size).numpy(), (1, samples)
    return tensor.contiguous().view(-1, size).numpy(), (positions, 1)


def row_sums(gradient: Tensor, x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """definition.normalized_sums."""
    samples, rows, size = x.shape
    weight, bias = (torch.empty(samples, size) for _ in range(2))
    (g, g_steps), (values, x_steps) = matrix(gradient), matrix(x)
    arrays = (g, values, weight.numpy(), bias.numpy())
    in_threads(samples, x.numel(), _rows, arrays, g_steps, x_steps, rows, np.float32(eps), centered)
    return weight, bias


def channel_parts(gradient: Tensor, x: Tensor) -> definition.ChannelParts:
    """gradient, x [B, C, n]; of torch's two memory formats the one that x has, without a copy."""
    samples, channels, size = x.shape
    parts = torch.empty(PLANES, samples, channels)
    pair = [one.detach().float() for one in (gradient, x)]
    if x.transpose(1, 2).is_contiguous() and not x.is_contiguous():
        beside = [one.transpose(1, 2).contiguous().view(-1, channels).numpy() for one in pair]
        in_threads(samples, x.numel(), _samples, *beside, size, parts.numpy())
    else:
        flat = [one.contiguous().view(-1).numpy() for one in pair]
        in_threads(samples * channels, x.numel(), _planes, *flat, size, parts.view(PLANES, -1).numpy())
    return definition.ChannelParts(*parts)


def batch_sums(gradient: Tensor, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """definition.channel_sums with the batch's own statistics."""
    parts = channel_parts(gradient, x)
    return definition.finished(parts, *definition.statistics(parts, x.shape[2], 0), eps)

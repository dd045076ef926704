"""A sign and a few levels for each value that is sent: a scale a chunk in one byte, the levels by tensor.

    m_c      the mean |x| of the values of chunk c; M the largest of these in its tensor
    s_c      m_c / M rounded to three bits behind the leading one, 2^-32 < s_c <= 1: a byte
    level    how many of the bounds are below |x| / (M s_c)
    l_j      sum |x| / sum s_c, over all values of the tensor that have the level j: one step of Lloyd's iteration
    decoded  sign(x) l_j s_c

With two levels the error in |x|^2 is 0.0045 of gaussian chunks, 0.0128 of laplacian ones; levels that are best for each
chunk by itself leave 0.0038 and 0.0115, constant ones 0.0093 and 0.0133. Without a scale by chunk, where rows of 512
elements differ by a lognormal factor of sigma 1, it is 0.20 instead of 0.0115: chunks of an embedding need their own.

Sums are of whole numbers (signs.py), so that they depend on no order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.arithmetic import signs
from gradwire.arithmetic.finite import LARGEST
from gradwire.methods.chunk_topk.chunks import Chunks

# By bits, in units of the chunk's mean: near the middle between the levels that Lloyd's iteration ends at.
BOUNDS: dict[int, tuple[float, ...]] = {1: (), 2: (1.1,), 3: (0.95, 1.1, 1.35)}
DROPPED = 20  # bits of a float32's mantissa that a scale has not
LOWEST = (127 << 3) - 255  # a scale's exponent and three bits of mantissa, less its byte: 255 is 1.0
WEIGHT = 2.0**35  # a scale times this is a whole number


class Quantized(NamedTuple):
    """What is sent of the values."""

    levels: Tensor  # float32 [K, L]
    scales: Tensor  # uint8 [G]; 0: nothing of this chunk
    codes: Tensor  # int64 [E]: the level, above it the sign


def quantize(values: Tensor, chunks: Chunks, bits: int, active: Tensor | None) -> Quantized:
    """values float32 [E], finite; active: bool [K], tensors of which something is sent, None: all."""
    entries = chunks.entries
    means = entries.active(_means(values, chunks), active)
    tops = chunks.tops.largest(means)
    scales = _bytes(means, entries.of_tensors(tops))
    factors = factors_of(scales)
    values = torch.where(entries.spread(scales) > 0, values, 0.0)
    sizes, units = values.abs(), factors.double() * entries.of_tensors(tops)
    level = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    for bound in BOUNDS[bits]:
        level += sizes > entries.spread((units * bound).float())
    levels = torch.stack([_level(values, level == number, factors, chunks) for number in range(1 << bits - 1)], 1)
    return Quantized(levels, scales, level | (values < 0).long() << bits - 1)


def dequantize(said: Quantized, chunks: Chunks) -> Tensor:
    """float32 [E], at most the largest level of its tensor; codes may be any of their bits."""
    entries, factors = chunks.entries, factors_of(said.scales)
    table = torch.cat([entries.of_tensors(level) * factors for level in said.levels.unbind(1)])  # [L G]
    n_levels = said.levels.shape[1]
    chunk = entries.spread(torch.arange(len(entries), device=table.device))
    sizes = table[(said.codes & n_levels - 1) * len(entries) + chunk]
    return torch.where(said.codes >= n_levels, -sizes, sizes)


def factors_of(scales: Tensor) -> Tensor:
    """s, float32 [G]: what the bytes stand for."""
    return (scales.int() + LOWEST << DROPPED).view(torch.float32).masked_fill(scales == 0, 0.0)


def _means(values: Tensor, chunks: Chunks) -> Tensor:
    """m, float32 [G], of what is not zero."""
    entries = chunks.entries
    sums = signs.magnitudes(values, entries.largest(values), entries)
    return (sums / entries.sums(values != 0).clamp(min=1)).float()


def _bytes(means: Tensor, tops: Tensor) -> Tensor:
    """uint8 [G] of m / M; what is less than the smallest scale is not sent at all: more would go than there is."""
    ratios = torch.where(tops > 0, means / tops, 0.0)
    rounded = ratios.view(torch.int32) + (1 << DROPPED - 1) >> DROPPED
    return (rounded - LOWEST).clamp_(0, 255).to(torch.uint8)


def _level(values: Tensor, own: Tensor, factors: Tensor, chunks: Chunks) -> Tensor:
    """l_j, float32 [K], over the values that are `own`, bool [E]; 0 where there is none."""
    by_tensor, own = chunks.by_tensor, own & (values != 0)
    total = signs.magnitudes(torch.where(own, values, 0.0), by_tensor.largest(values), by_tensor)
    weights = chunks.entries.spread((factors.double() * WEIGHT).long())
    weight = by_tensor.sums(torch.where(own, weights, 0)).double() / WEIGHT
    return torch.where(weight > 0, total / weight, 0.0).clamp_(max=LARGEST).float()

"""Step 1, moments: what a normalization's scale and shift, or a bias, get from each sample, in one pass.

    weight: c_b = sum_t G xhat,    bias: c_b = sum_t G        G: gradient of the output, xhat: the normalized input

xhat is made where it is multiplied and never stored. By device and dtype alone: Numba on a CPU, Triton on a GPU, and
for everything else (float64, no Triton, wider rows) plain torch, which is the definition of right.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from math import prod
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments.precision import exact_dtype, position_sums

Sums = tuple[Tensor | None, Tensor | None]
SHORT = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192  # features of a row that a program of the GPU holds in registers
KERNELS = {
    "cpu": ("gradwire.moments.cpu.normalization_sums", "numba"),
    "cuda": ("gradwire.moments.gpu.normalization_sums", "triton"),
}


class ChannelParts(NamedTuple):
    """Of each sample's n positions, by channel, [B, C]: mean of x, sum (x - mean)^2, sum G, sum G (x - mean)."""

    mean: Tensor
    squares: Tensor
    gradient: Tensor
    product: Tensor


class SumKernels(Protocol):
    """What a compiled implementation has; B, T, D, C, n > 0, dtypes of SHORT, results float32."""

    def row_sums(self, gradient: Tensor, x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
        """normalized_sums."""

    def channel_parts(self, gradient: Tensor, x: Tensor) -> ChannelParts:
        """gradient, x [B, C, n], any strides."""

    def batch_sums(self, gradient: Tensor, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """channel_sums with the batch's own statistics; gradient, x [B, C, n], any strides."""


def select(gradient: Tensor, x: Tensor) -> SumKernels | None:
    """The compiled kernels for these tensors; None: plain torch."""
    if gradient.dtype not in SHORT or x.dtype not in SHORT or gradient.device != x.device or not x.numel():
        return None
    plain = all(type(one) in (Tensor, nn.Parameter) for one in (gradient, x))  # and no DTensor
    return _load(x.device.type) if plain else None


@functools.cache
def _load(kind: str) -> SumKernels | None:
    name, compiler = KERNELS.get(kind, ("", ""))
    # where a compiler is missing, gradwire.codec has said so
    return cast(SumKernels, importlib.import_module(name)) if name and find_spec(compiler) else None


def normalized_sums(
    gradient: Tensor, x: Tensor, eps: float, centered: bool, want_weight: bool = True, want_bias: bool = True
) -> Sums:
    """(sum_t G xhat or None, sum_t G or None), [B, D]; xhat: rows of D over their standard deviation (centered:
    LayerNorm) or root mean square (RMSNorm). gradient, x [B, T, D]."""
    if gradient.shape != x.shape or x.ndim != 3:
        raise ValueError(f"expected gradient and x [B, T, D], got {list(gradient.shape)} and {list(x.shape)}")
    if not want_weight:
        return None, position_sums(gradient, (1,)) if want_bias else None
    kernels = select(gradient, x)
    if kernels is not None and (x.shape[2] <= WIDEST or x.device.type == "cpu"):
        weight, bias = kernels.row_sums(gradient, x, eps, centered)
        return weight, bias if want_bias else None
    shape, values = list(x.shape[2:]), x.to(exact_dtype(x))
    normalized = F.layer_norm(values, shape, eps=eps) if centered else F.rms_norm(values, shape, eps=eps)
    total = (gradient.to(exact_dtype(gradient)) * normalized).sum(1)
    return total, position_sums(gradient, (1,)) if want_bias else None


def channel_sums(
    gradient: Tensor, x: Tensor, eps: float, groups: int = 0, given: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(sum_t G xhat, sum_t G), [B, C]; gradient, x [B, C, *], NCHW or channels_last.

    xhat has the statistics of a channel over the batch (BatchNorm), or of every sample's `groups` groups of channels
    (GroupNorm; InstanceNorm: as many as channels), or the given ones, mean and variance [C].
    """
    if gradient.shape != x.shape or x.ndim < 2:
        raise ValueError(f"expected gradient and x [B, C, *], got {list(gradient.shape)} and {list(x.shape)}")
    kernels = select(gradient, x) if x.ndim > 2 else None
    if kernels is None:
        normalized = normalized_channels(x.to(exact_dtype(x)), eps, groups, given)
        positions = range(2, x.ndim)
        product = gradient.to(exact_dtype(gradient)) * normalized
        return position_sums(product, positions), position_sums(gradient, positions)
    gradient, x = flat(gradient), flat(x)
    if groups == 0 and given is None:
        return kernels.batch_sums(gradient, x, eps)
    parts = kernels.channel_parts(gradient, x)
    return finished(parts, *(statistics(parts, x.shape[2], groups) if given is None else given), eps)


def normalized_channels(x: Tensor, eps: float, groups: int, given: tuple[Tensor, Tensor] | None) -> Tensor:
    """xhat [B, C, *], by torch."""
    if not x.numel():
        return x
    if given is not None:
        mean, variance = (one.to(x.dtype) for one in given)
        return F.batch_norm(x, mean, variance, training=False, eps=eps)
    return F.group_norm(x, groups, eps=eps) if groups else F.batch_norm(x, None, None, training=True, eps=eps)


def flat(tensor: Tensor) -> Tensor:
    """[B, C, *] -> [B, C, n], without a copy in both of torch's memory formats."""
    try:
        return tensor.view(*tensor.shape[:2], prod(tensor.shape[2:]))
    except RuntimeError:
        return tensor.flatten(2)


def statistics(parts: ChannelParts, positions: int, groups: int) -> tuple[Tensor, Tensor]:
    """(mean, variance) of the batch's channels [C], or of each sample's groups of channels [B, C]."""
    batch, channels = parts.mean.shape
    shape = (batch, groups, channels // groups) if groups else (1, batch, channels)
    axis = 2 if groups else 1
    means, squares = parts.mean.reshape(shape), parts.squares.reshape(shape)
    mean = means.mean(axis, keepdim=True)
    variance = (squares / positions + (means - mean).square()).mean(axis, keepdim=True)
    if not groups:
        return mean.view(channels), variance.view(channels)
    return mean.expand(shape).reshape(batch, channels), variance.expand(shape).reshape(batch, channels)


def finished(parts: ChannelParts, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """sum G (x - mean) / sqrt(variance + eps), sum G; mean, variance [C] or [B, C]."""
    deviation = torch.rsqrt(variance.float() + eps)
    return (parts.product + (parts.mean - mean.float()) * parts.gradient) * deviation, parts.gradient

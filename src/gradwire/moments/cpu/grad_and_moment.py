"""Step 1, moments: weight gradient and second moment of a Linear or a convolution on a CPU, some samples at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.precision import exact_dtype, room_for_sums

Pair = tuple[Tensor, Tensor]
# Samples are taken together while their contributions fit in so many elements, and never more than an eighth of them. 2
# MiB of float32 is about one core's L2, and nothing has batch x weights elements.
WORKSPACE = 1 << 19
EIGHT = 8  # more at once are no faster


def chunk_of(samples: int, numel: int, most: int) -> int:
    """How many samples' contributions are formed at once."""
    return max(1, min(WORKSPACE // max(1, numel), samples // 8, most))


def linear(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Pair:
    """c_b = G_b^T X_b; gradient [B, T, O], x [B, T, I] -> dW [O, I] in dtype, moment [O, I] in float32 or float64."""
    fold, wide = fold_here(), exact_dtype(gradient)
    total, moment = room_for_sums(gradient, torch.Size((gradient.shape[2], x.shape[2])), place)
    samples, turned = gradient.shape[0], gradient.transpose(1, 2)
    chunk = chunk_of(samples, total.numel(), EIGHT)
    each = total.new_empty(chunk, *total.shape)
    for start in range(0, samples, chunk):
        left, right = turned[start : start + chunk].to(wide), x[start : start + chunk].to(wide)
        some = each if left.shape[0] == chunk else each[: left.shape[0]]
        if left.shape[0] == 1:  # 10 % faster than a batch of one
            torch.mm(left[0], right[0], out=some[0])
        else:
            torch.bmm(left, right, out=some)
        fold(some, total, moment, start == 0)
    return total.to(dtype), moment


def convolution(
    gradient: Tensor,
    x: Tensor,
    weight_shape: torch.Size,
    geometry: dict[str, Any],
    dtype: torch.dtype,
    channels_last: bool,
    place: Tensor | None = None,
) -> Pair:
    """c_b: the weight gradient of sample b alone; gradient [B, O, *], x [B, I, *]; geometry: aten.convolution's own.

    channels_last: how the weight lies, which a kernel may follow; autograd takes either.

    K samples are one convolution of K times as many groups: 1.1 to 1.3 times the plain weight gradient with K = 8 or
    16, where one by one takes 1.35 to 1.8 (EPYC with AVX-512, one thread, 3x3, 32 and 64 channels, B 64).
    """
    fold, wide = fold_here(), exact_dtype(gradient)
    total, moment = room_for_sums(gradient, weight_shape, place)
    chunk = chunk_of(x.shape[0], total.numel(), 2 * EIGHT)
    weight = total.new_empty(0)
    for turn, (left, right) in enumerate(zip(torch.split(gradient, chunk), torch.split(x, chunk), strict=True)):
        count = left.shape[0]
        if count == 0:
            break
        if weight.shape[:1] != (count * weight_shape[0],):  # only its shape is read
            weight = total.new_empty(count * weight_shape[0], *weight_shape[1:])
        left, right = (side.to(wide).reshape(1, count * side.shape[1], *side.shape[2:]) for side in (left, right))
        numbers = {**geometry, "groups": count * geometry["groups"]}
        mask = [False, True, False]
        each = torch.ops.aten.convolution_backward(left, right, weight, None, **numbers, output_mask=mask)[1]
        fold(each.reshape(count, *weight_shape).contiguous(), total, moment, turn == 0)
    return total.to(dtype), moment


def fold_here() -> Callable[[Tensor, Tensor, Tensor, bool], None]:
    """Loaded when it is used, since it brings Numba along."""
    from gradwire.moments.cpu import fold

    return fold.fold_here()

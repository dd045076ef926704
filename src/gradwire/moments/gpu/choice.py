"""Step 1, moments: which layers go to a fused kernel on a GPU. Imports Triton only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.gpu.chip import HALVES, chip, has_triton
from gradwire.moments.gpu.linear_plans import FEW_POSITIONS, plan_for, worth_it

Pair = tuple[Tensor, Tensor]


def linear_function(
    device: torch.device, dtype: torch.dtype, samples: int, positions: int, shape: torch.Size
) -> Callable[[Tensor, Tensor, torch.dtype, Tensor | None], Pair] | None:
    """What beats torch's own gradient and a moment beside it: a kernel, or products of all samples where none pays."""
    if not has_triton():
        return None
    if worth_it(samples, shape[0], shape[1], dtype, device):
        return linear
    return linear_by_products if dtype in (*HALVES, torch.float32) else None


def linear(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Pair:
    """G [B, T, O], X [B, T, I] -> dW [O, I] in dtype, sum_b (G_b^T X_b)^2 [O, I] in float32, by a kernel."""
    if gradient.numel() == 0 or x.numel() == 0:
        zeros = x.new_zeros(gradient.shape[-1], x.shape[-1], dtype=torch.float32)
        return zeros.to(dtype), zeros.clone()
    gradient, x = columns_together(gradient), columns_together(x)
    samples, positions, outputs = gradient.shape
    if positions <= FEW_POSITIONS:
        from gradwire.moments.gpu import linear_pairs

        return linear_pairs.launch(gradient, x, dtype)
    from gradwire.moments.gpu import linear_hopper

    plan = plan_for(samples, positions, outputs, x.shape[2], chip(x.device)[1])
    return linear_hopper.launch(gradient, x, dtype, plan, place)


def columns_together(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def linear_by_products(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> Pair:
    """As `linear`, by products that torch makes."""
    from gradwire.moments.gpu.linear_samples import grad_moment

    return grad_moment(gradient, x, dtype, place)


def takes_convolution(device: torch.device, dtype: torch.dtype, shape: torch.Size, geometry: dict[str, Any]) -> bool:
    """Whether `convolution` does: one group or depthwise up to 3 x 3 in two dimensions, with matrix units.

    H200, against cuDNN's weight gradient alone: 1.1 to 1.4 times; depthwise 5 x 5 2.1 times, which other ways beat.
    """
    if len(shape) != 4 or geometry["transposed"] or not has_triton() or chip(device)[0] < 8:
        return False
    if geometry["groups"] > 1:
        return shape[1] == 1 and shape[0] == geometry["groups"] and shape[2] * shape[3] <= 9
    return dtype in HALVES or (dtype == torch.float32 and bool(torch.backends.cudnn.allow_tf32))


def convolution(gradient: Tensor, x: Tensor, *given: Any) -> Pair:
    """g [B, O, *], x [B, C, *] -> dW in dtype, moment in float32, both laid out as the weight."""
    from gradwire.moments.gpu.convolution_moment import launch

    return launch(gradient, x, *given)

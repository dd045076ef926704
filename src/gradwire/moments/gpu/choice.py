"""Step 1, moments: which layers go to a fused kernel on a GPU. Imports Triton only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.gpu.chip import HALVES, chip, has_triton

Pair = tuple[Tensor, Tensor]


def linear_function(
    device: torch.device, dtype: torch.dtype, samples: int, shape: torch.Size
) -> Callable[[Tensor, Tensor, torch.dtype, Tensor | None], Pair] | None:
    """What beats torch's own gradient and a moment beside it: a kernel, or products of all samples where none pays."""
    if not has_triton():
        return None
    if worth_it(samples, shape[0], shape[1], dtype, device):
        return linear
    return linear_by_products if dtype in (*HALVES, torch.float32) else None


def worth_it(samples: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel beats `bmm`, square and sum there. Measured on an H200 only; elsewhere no.

    A call costs the host some 100 microseconds: layers whose per-sample gradients are written and read in less are not
    worth it.
    """
    return chip(device)[0] == 9 and dtype in HALVES and samples * outputs * inputs >= 2**23


def linear(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Pair:
    """G [B, T, O], X [B, T, I] -> dW [O, I] in dtype, sum_b (G_b^T X_b)^2 [O, I] in float32, by a kernel."""
    from gradwire.moments.gpu.linear_hopper import launch

    return launch(gradient, x, dtype, place)


def linear_by_products(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Pair:
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

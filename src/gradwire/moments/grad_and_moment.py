"""Step 1, moments: a weight gradient and its second moment from one pass over the samples, and who does it best.

    dW = sum_b c_b,    moment = sum_b c_b^2        c_b: what sample b contributes, in the weight's shape

Which implementation serves is decided by device, dtype and shape alone: the gradient's bits follow from it, and a
resumed run must choose as the first one did. None: torch's own gradient and a moment beside it are no worse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.cpu import grad_and_moment as cpu
from gradwire.moments.gpu import choice as gpu

Pair = tuple[Tensor, Tensor]
# The last argument is a place for the moment, which a function may use or not.
Linear = Callable[[Tensor, Tensor, torch.dtype, Tensor | None], Pair]
Convolution = Callable[[Tensor, Tensor, torch.Size, dict[str, Any], torch.dtype, bool, Tensor | None], Pair]


def linear_function(
    device: torch.device, dtype: torch.dtype, samples: int, positions: int, weight_shape: torch.Size
) -> Linear | None:
    """For gradient [B, T, O], x [B, T, I]; T = 1 needs none: its moment is one more GEMM. weight_shape: [O, I]."""
    if positions < 2:
        return None
    if device.type == "cpu":
        return cpu.linear
    return gpu.linear_function(device, dtype, samples, weight_shape) if device.type == "cuda" else None


def convolution_function(
    device: torch.device, dtype: torch.dtype, weight_shape: torch.Size, geometry: dict[str, Any]
) -> Convolution | None:
    """For gradient [B, O, *], x [B, I, *]; geometry: aten.convolution's own numbers."""
    if device.type == "cpu":
        # float64 has no grouped kernel there, and is for tests
        return cpu.convolution if dtype in (torch.float32, torch.bfloat16, torch.float16) else None
    if device.type == "cuda" and gpu.takes_convolution(device, dtype, weight_shape, geometry):
        return gpu.convolution
    return None

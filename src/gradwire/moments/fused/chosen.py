"""Step 1, moments: which layers go to a fused kernel on a GPU. Imports Triton only when it is used."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.fused.tuning import HALVES, Shape, chip, worth_it

Pair = tuple[Tensor, Tensor]


@functools.cache
def has_triton() -> bool:
    """It comes with torch for CUDA on Linux; elsewhere the plain ways serve."""
    return importlib.util.find_spec("triton") is not None


def takes_linear(device: torch.device, dtype: torch.dtype, samples: int, positions: int, shape: torch.Size) -> bool:
    """Whether `linear` beats torch's own gradient and a moment beside it."""
    if device.type != "cuda" or positions < 2 or not has_triton():
        return False
    return worth_it(Shape(samples, positions, shape[0], shape[1]), dtype, device)


def linear(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> Pair:
    """G [B, T, O], X [B, T, I] -> dW [O, I] in dtype, moment in float32."""
    from gradwire.moments.fused.linear import grad_moment

    return grad_moment(gradient, x, dtype, place)


def takes_samples(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `samples` can serve, where `linear` does not."""
    return device.type == "cuda" and dtype in (*HALVES, torch.float32) and has_triton()


def samples(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> Pair:
    """As `linear`, by products that torch makes."""
    from gradwire.moments.fused.samples import grad_moment

    return grad_moment(gradient, x, dtype, place)


def takes_convolution(device: torch.device, dtype: torch.dtype, shape: torch.Size, geometry: dict[str, Any]) -> bool:
    """Whether `convolution` does: one group or depthwise up to 3 x 3 in two dimensions, with matrix units.

    H200, against cuDNN's weight gradient alone: 1.1 to 1.4 times; depthwise 5 x 5 2.1 times, which other ways beat.
    """
    if device.type != "cuda" or len(shape) != 4 or geometry["transposed"] or not has_triton() or chip(device)[0] < 8:
        return False
    if geometry["groups"] > 1:
        return shape[1] == 1 and shape[0] == geometry["groups"] and shape[2] * shape[3] <= 9
    return dtype in HALVES or (dtype == torch.float32 and bool(torch.backends.cudnn.allow_tf32))


def convolution(
    gradient: Tensor,
    x: Tensor,
    shape: torch.Size,
    geometry: dict[str, Any],
    dtype: torch.dtype,
    channels_last: bool,
    place: Tensor | None,
) -> Pair:
    """g [B, O, *], x [B, C, *] -> dW in dtype, moment in float32, both laid out as the weight."""
    from gradwire.moments.fused.convolution import launch

    numbers = (geometry["stride"], geometry["padding"], geometry["dilation"], geometry["groups"])
    return launch(gradient, x, list(shape), *numbers, dtype, channels_last, place)

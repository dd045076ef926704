"""Step 1, moments: weight gradient and second moment of a Linear on Hopper: those of a pointwise convolution.

    dW = sum_b G_b^T X_b,    moment = sum_b (G_b^T X_b)^2        G [B, T, O], X [B, T, I], both [O, I]

The plane is one row of T positions (convolution_hopper.py).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.moments.gpu.chip import chip
from gradwire.moments.gpu.convolution_hopper import Ready, prepare
from gradwire.moments.gpu.convolution_plans import ConvolutionShape
from gradwire.moments.gpu.hopper_plans import linear_boxes


def mappable(tensor: Tensor) -> Tensor:
    """The tensor itself where a tensor map can read it (rows on 16 bytes); else a copy with padded rows.

    H200, GPT-2's head (50257 x 768): copy and kernel take half the time of cuBLAS, which odd rows slow down.
    """
    per_row = 16 // tensor.element_size()
    strides_fit = all(stride > 0 and stride % per_row == 0 for stride in tensor.stride()[:-1])
    if tensor.stride(-1) == 1 and strides_fit and tensor.data_ptr() % 16 == 0:
        return tensor
    samples, positions, columns = tensor.shape
    padded = tensor.new_empty(samples, positions, -(-columns // per_row) * per_row)[..., :columns]
    return padded.copy_(tensor)


@functools.lru_cache(maxsize=1024)
def prepared(
    shape: tuple[int, int, int, int], gradient_strides: tuple[int, ...], x_strides: tuple[int, ...], programs: int
) -> Ready:
    """shape: B, T, O, I; strides: how the tensors lie in memory."""
    samples, positions, outputs, inputs = shape
    plane, one, none = (1, positions), (1, 1), (0, 0)
    geometry = ConvolutionShape(samples, 1, inputs, outputs, *plane, *plane, one, one, none, one)
    ready = prepare(geometry, linear_boxes(*shape, programs), pieces=1)
    (g_sample, g_row, _), (x_sample, x_row, _) = gradient_strides, x_strides
    gradient_map = (ready.gradient_map[0], [g_sample, g_row, g_row, 1])
    return replace(ready, gradient_map=gradient_map, x_map=(ready.x_map[0], [x_sample, x_row, x_row, x_row, 1]))


def launch(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """gradient [B, T, O] and x [B, T, I] in bfloat16 or float16 -> dW [O, I] in dtype, moment [O, I] in float32."""
    (samples, positions, outputs), inputs = gradient.shape, x.shape[2]
    weight_gradient = torch.empty(outputs, inputs, dtype=dtype, device=x.device)
    if place is None or not place.is_contiguous():
        place = torch.empty(outputs, inputs, dtype=torch.float32, device=x.device)
    if gradient.numel() == 0 or x.numel() == 0:
        return weight_gradient.zero_(), place.zero_()
    gradient, x = mappable(gradient), mappable(x)
    shape = (samples, positions, outputs, inputs)
    ready = prepared(shape, gradient.stride(), x.stride(), chip(x.device)[1])
    ready.run(gradient, x, weight_gradient, place)
    return weight_gradient, place

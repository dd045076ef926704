"""Step 1, moments: what a layer computes of (x, weight, bias): a product with a matrix, or a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.moments.grad_and_moment import convolution_function, linear_function

SPATIAL = ("stride", "padding", "dilation", "output_padding")


@dataclass(frozen=True)
class Multiply:
    """x W^T + bias; turned: the weight lies as [I, O]; names: those of weight and bias in the layer."""

    names: tuple[str, str] = ("weight", "bias")
    turned: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.turned or bias is None:
            return F.linear(x, weight.T if self.turned else weight, bias)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x, of which only the shape is read."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (rows @ (weight.T if self.turned else weight)).view(x.shape)

    def serves(self, x: Tensor, weight: Tensor, axis: int, samples: int) -> bool:
        """Whether gradient and moment together are worth it for these shapes; axis: the samples lie along it.

        T = 1: the moment is one more GEMM and can wait, but its bias and its check are cheaper here.
        """
        if x.ndim < 2 or axis > x.ndim - 2:
            return False
        positions = x.numel() // max(1, samples * x.shape[-1])
        return positions == 1 or linear_function(x.device, x.dtype, samples, positions, weight.shape) is not None

    def numbers(self) -> list[int]:
        """The operation as a compiled graph can carry it; `operation_of` is the way back."""
        return [int(self.turned)]


@dataclass(frozen=True)
class Convolve:
    """aten's convolution, plain or transposed; geometry: its numbers by their names there."""

    geometry: dict[str, Any]
    names: tuple[str, str] = ("weight", "bias")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, **self.geometry)  # type: ignore[no-any-return]

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        mask = [True, False, False]
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, **self.geometry, output_mask=mask
        )[0]
        return found

    def serves(self, x: Tensor, weight: Tensor, axis: int, samples: int) -> bool:
        batched = x.ndim == len(self.geometry["stride"]) + 2 and x.shape[0] == samples
        return batched and convolution_function(x.device, x.dtype, weight.shape, self.geometry) is not None

    def numbers(self) -> list[int]:
        spatial = [number for name in SPATIAL for number in self.geometry[name]]
        return [*spatial, int(self.geometry["transposed"]), self.geometry["groups"]]


Operation = Multiply | Convolve  # linear in each of x, weight and bias


def operation_of(numbers: Sequence[int]) -> Operation:
    """What was written as `numbers`."""
    if len(numbers) == 1:
        return Multiply(turned=bool(numbers[0]))
    *spatial, transposed, groups = numbers
    dims = len(spatial) // len(SPATIAL)
    geometry: dict[str, Any] = {name: list(spatial[n * dims : n * dims + dims]) for n, name in enumerate(SPATIAL)}
    return Convolve({**geometry, "transposed": bool(transposed), "groups": groups})

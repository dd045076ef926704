"""Step 1, moments: convolutions of any dimension, plain and transposed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradwire.moments.grad_and_moment import convolution_function
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_function import run_layer
from gradwire.moments.layer_table import Uses, register
from gradwire.moments.operations import Convolve
from gradwire.moments.precision import exact_dtype, position_sums
from gradwire.moments.swapped_forward import plain_forward
from gradwire.moments.uses import Direct, Doubt, Use, rows_of_samples


@dataclass
class Patches(Use):
    """c_b = weight gradient of the convolution of sample b alone; x [B, I, *], gradients [B, O, *]."""

    x: Tensor
    gradients: Tensor
    shape: torch.Size
    geometry: dict[str, Any]
    channels_last: bool = False  # the weight
    rows: int = 1  # of a sample, one after another

    def __post_init__(self) -> None:
        self.samples = self.x.shape[0] // self.rows
        self.dtype = exact_dtype(self.x)

    @cached_property
    def weight(self) -> Tensor:
        """Only its shape is read: no weight gradient depends on the weight."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.x.device)

    def _between(self, start: int, stop: int) -> Tensor:
        rows = slice(start * self.rows, stop * self.rows)
        gradient, x = (tensor[rows].to(self.dtype) for tensor in (self.gradients, self.x))
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, self.weight, None, **self.geometry, output_mask=[False, True, False]
        )[1]
        return found

    def gradient(self, dtype: torch.dtype) -> Tensor:
        grad_and_moment = convolution_function(self.x.device, self.x.dtype, self.shape, self.geometry)
        if grad_and_moment is None or self.rows != 1:
            return self.total().to(dtype)
        given = (self.gradients, self.x, self.shape, self.geometry, dtype, self.channels_last)
        total, self.finished = grad_and_moment(*given, self.place)
        return total

    def sample(self, index: int) -> Tensor:
        return self._between(index, index + 1)

    def total(self) -> Tensor:
        return self._between(0, self.samples) if self.summed is None else self.summed

    def folded(self, outer: int, samples: int, inner: int) -> Patches:
        x, gradients = (rows_of_samples(side, outer, samples, inner).flatten(0, 1) for side in (self.x, self.gradients))
        return replace(self, x=x, gradients=gradients, rows=outer * inner)

    @staticmethod
    def join(uses: Sequence[Any]) -> Use | None:
        """More rows of the same samples, where all are of one size."""
        about = [(use.x.shape[1:], use.gradients.shape[1:], use.geometry) for use in uses]
        if any(one != about[0] for one in about):
            return None

        def joined(name: str) -> Tensor:
            sides = [getattr(use, name).unflatten(0, (use.samples, use.rows)) for use in uses]
            return torch.cat(sides, 1).flatten(0, 1)

        first: Patches = uses[0]
        return replace(first, x=joined("x"), gradients=joined("gradients"), rows=sum(use.rows for use in uses))

    def noise(self) -> float:
        per_output = self.shape.numel() / max(1, self.gradients.shape[1])
        return super().noise() * float(self.x.norm()) * math.sqrt(per_output / max(1, self.x.numel()))


def lies_channels_last(weight: Tensor) -> bool:
    return weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def convolution_forward(module: _ConvNd, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """By a Function that makes weight gradient and moment together, where that is faster than a tap beside torch's."""
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if len(args) == 1 and not kwargs and plain:
        operation = Convolve(numbers_of(module, list(module.padding), list(module.output_padding)))
        output = run_layer(module, tap, args[0], "", operation)
        if output is not None:
            return output
    return plain_forward(module, tap, *args, **kwargs)


def output_padding(module: _ConvNd, x: Tensor, gradient: Tensor) -> list[int]:
    """What a transposed convolution added to its output; output_size says it call by call, so the sizes are asked."""
    if not module.transposed:
        return list(module.output_padding)
    numbers: Iterator[Any] = zip(module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
    return [
        wanted - ((given - 1) * stride - 2 * int(padding) + dilation * (kernel - 1) + 1)
        for wanted, given, (stride, padding, dilation, kernel) in zip(
            gradient.shape[2:], x.shape[2:], numbers, strict=True
        )
    ]


def geometry_of(module: _ConvNd, x: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """(the input as the convolution proper sees it, its numbers): padding by value is done before."""
    padding: Any = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):  # "same" may be one longer on one side
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        padding = [0] * len(module.kernel_size)
    return x, numbers_of(module, list(padding), output_padding(module, x, gradient))


def numbers_of(module: _ConvNd, padding: list[Any], added: list[int]) -> dict[str, Any]:
    return {
        "stride": list(module.stride),
        "padding": padding,
        "dilation": list(module.dilation),
        "transposed": module.transposed,
        "output_padding": added,
        "groups": module.groups,
    }


@register(
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    forward=convolution_forward,
    own_axis=0,
    casts=True,
)
def convolution(module: _ConvNd, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """weight: as Linear with T = output positions and X = patches, sample by sample; bias: sum over positions."""
    dims = len(module.kernel_size) + 2
    if gradient.ndim != dims:
        raise Doubt(f"its input has {gradient.ndim} dims and no batch axis; {dims} with one")
    gradient = call.samples_first(gradient)
    if "weight" in call.wanted:
        x, geometry = geometry_of(module, saved[0], gradient)
        yield "weight", Patches(x, gradient, module.weight.shape, geometry, lies_channels_last(module.weight))
    if "bias" in call.wanted:
        yield "bias", Direct(position_sums(gradient, range(2, gradient.ndim)))

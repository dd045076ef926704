"""Step 1, moments: layers that multiply by a matrix: Linear, and the transposed one of `transformers`.

weight: c_b = G_b^T X_b = sum_t g_bt x_bt^T        bias: c_b = sum_t g_bt        G [B, T, O], X [B, T, I]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.cpu.grad_and_moment import chunk_of
from gradwire.moments.grad_and_moment import linear_function
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_function import run_layer
from gradwire.moments.layer_table import Uses, register
from gradwire.moments.operations import Multiply
from gradwire.moments.precision import exact_dtype, wide_products
from gradwire.moments.swapped_forward import plain_forward
from gradwire.moments.uses import Direct, Use, rows_of_samples


@dataclass
class Positions(Use):
    """c_b = left_b^T right_b, left [B, T, R], right [B, T, C]: a matrix used at T positions."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        self.samples = self.left.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return exact_dtype(self.left)

    def sample(self, index: int) -> Tensor:
        return self.left[index].to(self.dtype).T @ self.right[index].to(self.dtype)

    def total(self) -> Tensor:
        return self.left.to(self.dtype).flatten(0, 1).T @ self.right.to(self.dtype).flatten(0, 1)

    def along(self, probe: Tensor | None) -> Tensor:
        if probe is None or self.summed is not None:
            return super().along(probe)
        left, right = (side.to(self.dtype).flatten(0, 1) for side in (self.left, self.right))
        return left.T @ (right @ probe.to(self.dtype))

    def noise(self) -> float:
        rows = self.left.shape[0] * self.left.shape[1]
        left, right = (float(side.to(self.dtype).norm()) for side in (self.left, self.right))
        return left * right / math.sqrt(max(1, rows))

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """T = 1: torch's own product, since the moment is one more GEMM, and later goes straight where it belongs."""
        left, right = self.left, self.right
        if left.shape[1] == 1 and left.dtype == right.dtype:
            return (left[:, 0].T @ right[:, 0]).to(dtype)
        shape = torch.Size((left.shape[2], right.shape[2]))
        grad_and_moment = linear_function(left.device, left.dtype, left.shape[0], left.shape[1], shape)
        if grad_and_moment is None:
            return self.total().to(dtype)
        total, self.finished = grad_and_moment(left, right, dtype, self.place)
        return total

    def write(self, out: Tensor) -> None:
        """T = 1: one GEMM, which needs no zeros to begin with."""
        if self.finished is None and self.left.shape[1] == 1 and self.samples:
            left, right = (side[:, 0].to(out.dtype).square() for side in (self.left, self.right))
            torch.addmm(out, left.T, right, beta=0, out=out)
        else:
            super().write(out)

    def _accumulate(self, out: Tensor) -> None:
        """T = 1: (left*left)^T (right*right), one GEMM; otherwise sample by sample."""
        if self.left.shape[1] == 1:
            left, right = (side[:, 0].to(self.dtype).square() for side in (self.left, self.right))
            out.addmm_(left.T, right)
            return
        chunk = chunk_of(self.samples, out.numel(), self.samples)
        if chunk == 1:
            super()._accumulate(out)
            return
        for left, right in zip(torch.split(self.left, chunk), torch.split(self.right, chunk), strict=True):
            out += wide_products(left, right, self.dtype).square_().sum(0)

    def folded(self, outer: int, samples: int, inner: int) -> Positions:
        """The rows are positions too."""
        left, right = (rows_of_samples(side, outer, samples, inner).flatten(1, 2) for side in (self.left, self.right))
        return Positions(left, right)

    @staticmethod
    def join(uses: Sequence[Any]) -> Use:
        """Concatenated along T: (sum of uses)^2 with all cross terms."""
        return Positions(torch.cat([use.left for use in uses], 1), torch.cat([use.right for use in uses], 1))


def linear_forward(operation: Multiply, module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    output = run_layer(module, tap, args[0], "", operation) if len(args) == 1 and not kwargs else None
    return plain_forward(module, tap, *args, **kwargs) if output is None else output


@register(nn.Linear, forward=partial(linear_forward, Multiply()), casts=True)
def linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """weight [O, I]."""
    if "weight" in call.wanted:
        yield "weight", Positions(call.positions(gradient), call.positions(saved[0]))
    if "bias" in call.wanted:
        yield "bias", Direct(call.sums(gradient))


@register("transformers.pytorch_utils.Conv1D", forward=partial(linear_forward, Multiply(turned=True)), casts=True)
def transposed_linear(module: nn.Module, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """weight [I, O]: c_b = X_b^T G_b."""
    if "weight" in call.wanted:
        yield "weight", Positions(call.positions(saved[0]), call.positions(gradient))
    if "bias" in call.wanted:
        yield "bias", Direct(call.sums(gradient))

"""Step 1, moments: a weight gradient and its second moment from one pass over the samples, and who does it best.

    dW = sum_b c_b,    moment = sum_b c_b^2        c_b: what sample b contributes, in the weight's shape

Which implementation serves is decided by device, dtype and shape alone: the gradient's bits follow from it, and a
resumed run must choose as the first one did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.moments.fused import chosen

Pair = tuple[Tensor, Tensor]
# The last argument is a place for the moment, which a function may use or not.
Linear = Callable[[Tensor, Tensor, torch.dtype, Tensor | None], Pair]
Convolution = Callable[[Tensor, Tensor, torch.Size, dict[str, Any], torch.dtype, bool, Tensor | None], Pair]
Function = TypeVar("Function")

# Samples are taken together while their contributions fit in so many elements, and never more than an eighth of them. 2
# MiB of float32 is about one core's L2, and nothing has batch x weights elements.
WORKSPACE = 1 << 19
EIGHT = 8  # more at once are no faster


class Problem(NamedTuple):
    """What a choice goes by. Linear: weight_shape [O, I]; positions: T, or of a convolution's output; 0: unknown."""

    device: torch.device
    dtype: torch.dtype
    samples: int
    positions: int
    weight_shape: torch.Size
    geometry: dict[str, Any] | None = None


@dataclass(frozen=True)
class Candidate(Generic[Function]):
    """One implementation; serves: the problems it takes; load: imports it, so Triton is loaded only when chosen."""

    serves: Callable[[Problem], bool]
    load: Callable[[], Function]


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything else is squared and summed in float32 (float16 squares underflow)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide_products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left_b^T right_b in `dtype`, [B, R, C]; on a GPU halves are multiplied as they are and summed in float32."""
    if left.is_cuda and left.dtype == right.dtype != dtype:
        return torch.bmm(left.transpose(1, 2), right, out_dtype=dtype)
    return left.to(dtype).transpose(1, 2) @ right.to(dtype)


def chunk_of(samples: int, numel: int, most: int) -> int:
    """How many samples' contributions are formed at once."""
    return max(1, min(WORKSPACE // max(1, numel), samples // 8, most))


def pair_of(gradient: Tensor, shape: torch.Size, place: Tensor | None) -> Pair:
    """Room for both sums; zeros where there is no sample to begin them."""
    wide = exact_dtype(gradient)
    if gradient.shape[0] == 0:
        return gradient.new_zeros(shape, dtype=wide), gradient.new_zeros(shape, dtype=wide)
    total = gradient.new_empty(shape, dtype=wide)
    return total, torch.empty_like(total) if place is None or not place.is_contiguous() else place


def linear(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Pair:
    """c_b = G_b^T X_b; gradient [B, T, O], x [B, T, I] -> dW [O, I] in dtype, moment [O, I] in float32 or float64."""
    fold, wide = folder(), exact_dtype(gradient)
    total, moment = pair_of(gradient, torch.Size((gradient.shape[2], x.shape[2])), place)
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
    fold, wide = folder(), exact_dtype(gradient)
    total, moment = pair_of(gradient, weight_shape, place)
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


def folder() -> Callable[[Tensor, Tensor, Tensor, bool], None]:
    """Loaded here, since it brings Numba along."""
    from gradwire.moments import folding

    return folding.fold_here()


def on_cpu(problem: Problem) -> bool:
    return problem.device.type == "cpu" and problem.positions > 1


def grouped_on_cpu(problem: Problem) -> bool:
    """float64 has no grouped kernel there, and is for tests."""
    return problem.device.type == "cpu" and problem.dtype in (torch.float32, torch.bfloat16, torch.float16)


def fused_linear(problem: Problem) -> bool:
    return chosen.takes_linear(*problem[:5])


def on_gpu(problem: Problem) -> bool:
    return problem.positions > 1 and chosen.takes_samples(problem.device, problem.dtype)


def fused_convolution(problem: Problem) -> bool:
    geometry = problem.geometry
    return geometry is not None and chosen.takes_convolution(
        problem.device, problem.dtype, problem.weight_shape, geometry
    )


# The first that serves is taken.
LINEARS: list[Candidate[Linear]] = [
    Candidate(fused_linear, lambda: chosen.linear),
    Candidate(on_gpu, lambda: chosen.samples),
    Candidate(on_cpu, lambda: linear),
]
CONVOLUTIONS: list[Candidate[Convolution]] = [
    Candidate(fused_convolution, lambda: chosen.convolution),
    Candidate(grouped_on_cpu, lambda: convolution),
]


def choose(candidates: list[Candidate[Function]], problem: Problem) -> Function | None:
    """The first implementation that serves; None where torch's own gradient and a moment beside it are no worse."""
    for candidate in candidates:
        if candidate.serves(problem):
            return candidate.load()
    return None

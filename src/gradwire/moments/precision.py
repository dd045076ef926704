"""Step 1, moments: in which precision contributions are multiplied, squared and summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything else is squared and summed in float32 (float16 squares underflow)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """Half precision is summed in float32."""
    return tensor.to(exact_dtype(tensor))


def position_sums(gradient: Tensor, positions: Sequence[int]) -> Tensor:
    """sum_t G in float32 (float64) over those axes; a gradient in half precision is not copied for it."""
    wide, axes = exact_dtype(gradient), tuple(positions)
    if all(gradient.shape[axis] == 1 for axis in axes):
        return gradient.squeeze(axes).to(wide) if axes else gradient.to(wide)
    return gradient.sum(axes, dtype=wide)


def wide_products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left_b^T right_b in `dtype`, [B, R, C]; on a GPU halves are multiplied as they are and summed in float32."""
    if left.is_cuda and left.dtype == right.dtype != dtype:
        return torch.bmm(left.transpose(1, 2), right, out_dtype=dtype)
    return left.to(dtype).transpose(1, 2) @ right.to(dtype)


def norm(tensor: Tensor) -> Tensor:
    """In float32 at least: a half's square underflows. A norm's norm is itself."""
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=exact_dtype(tensor))
    return found


def room_for_sums(gradient: Tensor, shape: torch.Size, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for a gradient and its moment, which may have a place; zeros where there is no sample to begin them."""
    dtype = exact_dtype(gradient)
    if gradient.shape[0] == 0:
        return gradient.new_zeros(shape, dtype=dtype), gradient.new_zeros(shape, dtype=dtype)
    total = gradient.new_empty(shape, dtype=dtype)
    return total, torch.empty_like(total) if place is None or not place.is_contiguous() else place

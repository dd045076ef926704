"""Step 1, moments: second moments of a Linear with few positions, by products of rows and cuBLAS.

T = 1: moment = (G*G)^T (X*X)        T > 1: sum over pairs t <= t' of (g_t g_t')^T (x_t x_t'), t < t' twice
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024


@triton.jit(do_not_specialize=["samples"])
def pair_kernel(
    rows, pairs, samples, columns, sample_stride, position_stride, twice: tl.constexpr, at_once: tl.constexpr
):
    """Program (t, t', block): pairs[t' (t'+1) / 2 + t] = row t * row t' of every sample, for t <= t'."""
    first, second = tl.program_id(1), tl.program_id(2)
    if first > second:
        return
    cell = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
    kept = cell < samples * columns
    place = rows + (cell // columns) * sample_stride + cell % columns
    left = tl.load(place + first * position_stride, mask=kept, other=0.0).to(tl.float32)
    right = tl.load(place + second * position_stride, mask=kept, other=0.0).to(tl.float32)
    product = left * right
    if twice:
        product = tl.where(first < second, 2.0 * product, product)
    pair = (second * (second + 1) // 2 + first).to(tl.int64)
    tl.store(pairs + pair * samples * columns + cell, product.to(pairs.dtype.element_ty), mask=kept)


def paired(tensor: Tensor, twice: bool) -> Tensor:
    """[B, T, columns] -> [T (T+1) / 2 B, columns], doubled off the diagonal if asked.

    Half precision is multiplied in float32 and kept in bfloat16: squares of float16 underflow, and the 8 bits that are
    left are one rounding a term, 1.6e-3 before any averaging.
    """
    samples, positions, columns = tensor.shape
    kept = tensor.dtype if tensor.dtype == torch.float32 else torch.bfloat16
    n_pairs = positions * (positions + 1) // 2
    pairs = torch.empty(n_pairs * samples, columns, dtype=kept, device=tensor.device)
    grid = (-(-samples * columns // AT_ONCE), positions, positions)
    strides = tensor.stride(0), tensor.stride(1)
    pair_kernel[grid](tensor, pairs, samples, columns, *strides, twice=twice, at_once=AT_ONCE, num_warps=4)
    return pairs


def matrix_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left^T right, summed in float32: [N, O], [N, I] -> [O, I]."""
    if left.is_cuda and left.dtype != torch.float32 and dtype == torch.float32:
        return torch.mm(left.T, right, out_dtype=torch.float32)
    if left.is_cuda:
        return (left.T @ right).to(dtype)
    return (left.T.float() @ right.float()).to(dtype)


def launch(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gradient [B, T, O], x [B, T, I] -> dW [O, I] in dtype, moment [O, I] in float32."""
    weight_gradient = matrix_product(gradient.flatten(0, 1), x.flatten(0, 1), dtype)
    return weight_gradient, matrix_product(paired(gradient, False), paired(x, True), torch.float32)

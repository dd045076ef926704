"""Step 1, moments: a Linear's weight gradient and second moment on a GPU from the products of all samples.

torch multiplies, sample by sample in one call; a kernel reads the products once and adds up both sums. For
float32, and for layers too small for a kernel that keeps the products on the chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compile.launching import launch_again
from gradwire.moments.precision import room_for_sums, wide_products

WORKSPACE = 1 << 25  # elements of the products that are there at once: 128 MiB
BLOCK = 1024


@triton.jit(do_not_specialize=["samples"])
def fold_kernel(each, total, moment, size, samples, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """total = sum over the first axis of each [samples, size], moment = of its squares; added to both if not FIRST."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    sums, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    source = each + at
    for _ in tl.range(0, samples):
        value = tl.load(source, mask=inside, other=0.0)
        sums += value
        squares += value * value
        source += size
    if not FIRST:
        sums += tl.load(total + at, mask=inside, other=0.0)
        squares += tl.load(moment + at, mask=inside, other=0.0)
    tl.store(total + at, sums, mask=inside)
    tl.store(moment + at, squares, mask=inside)


def fold(each: Tensor, total: Tensor, moment: Tensor, first: bool) -> None:
    """each [K, *shape], total and moment [*shape], float32 and contiguous."""
    size = total.numel()
    kind = (each.device.index, size % 16 == 0, size == 1, first)
    arguments = (each, total, moment, size, each.shape[0], first, BLOCK)
    launch_again("fold", kind, fold_kernel, (-(-size // BLOCK), 1, 1), arguments, num_warps=4)


def grad_moment(
    gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None, workspace: int = WORKSPACE
) -> tuple[Tensor, Tensor]:
    """gradient [B, T, O], x [B, T, I] -> dW [O, I] in dtype, moment [O, I] in float32."""
    total, moment = room_for_sums(gradient, torch.Size((gradient.shape[2], x.shape[2])), place)
    chunk = max(1, workspace // max(1, total.numel()))
    for turn, (left, right) in enumerate(zip(gradient.split(chunk), x.split(chunk), strict=True)):
        if left.shape[0]:
            fold(wide_products(left, right, torch.float32), total, moment, turn == 0)
    return total.to(dtype), moment

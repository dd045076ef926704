"""Step 1, moments: weight gradient and second moment of a Linear in one pass, for Hopper's own matrix instructions.

    dW = sum_b G_b^T X_b,    moment = sum_b (G_b^T X_b)^2        G [B, T, O], X [B, T, I], both [O, I]

One warp fetches (tensor maps, zeros past every edge), two warp groups of four multiply (hopper_tiles.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gradwire.compile.launching import is_known, launch_again
from gradwire.moments.gpu.hopper_tiles import Map, following, multiply, place, segment, turns
from gradwire.moments.gpu.join_tiles import TileCounts, join_parts
from gradwire.moments.gpu.linear_plans import LinearPlan

ROWS, COLUMNS, HALF_ROWS = 128, 128, 64
# These change from layer to layer: without this, every layer would be compiled on its own.
SIZES = ["outputs", "steps", "n_rows", "n_columns", "samples", "n_whole", "n_rest", "n_parts", "share"]


@gluon.jit
def fetch(maps, buffers, barriers, work, steps, stages: gl.constexpr, group: gl.constexpr):
    """The fetching warp: for every tile, sample and step three boxes, once both warp groups have left the buffer."""
    gradient_map, x_map = maps
    upper, lower, right = buffers
    full, empty = barriers
    step: gl.constexpr = right.shape[1]
    half: gl.constexpr = upper.shape[2]
    columns: gl.constexpr = right.shape[2]
    whole, rest = turns(work)
    stage, phase = 0, 1
    for index in range(whole + rest):
        tile, first, last, _slot = segment(index, whole, work)
        row, column = place(tile, work, group)
        for sample in range(first, last):
            for number in range(steps):
                mbarrier.wait(empty.index(stage), phase)
                ready = full.index(stage)
                mbarrier.expect(ready, step * (2 * half + columns) * 2)
                at, row_at, column_at = number * step, row * 2 * half, column * columns
                to_upper, to_lower = upper.index(stage), lower.index(stage)
                to_right = right.index(stage).reshape([1, step, columns])
                tma.async_copy_global_to_shared(
                    gradient_map, [sample, at, row_at], ready, to_upper.reshape([1, step, half])
                )
                tma.async_copy_global_to_shared(x_map, [sample, at, column_at], ready, to_right)
                tma.async_copy_global_to_shared(
                    gradient_map, [sample, at, row_at + half], ready, to_lower.reshape([1, step, half])
                )
                stage, phase = following(stage, phase, stages)


@gluon.jit(do_not_specialize=SIZES)
def linear_grad_moment_kernel(
    gradient_map, x_map, weight_gradient, moment, parts, outputs, inputs, steps, n_rows, n_columns, samples,
    n_whole, n_rest, n_parts, share,
    stages: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """Sets up the ring of buffers and sends the warps to their work."""
    half: gl.constexpr = gradient_map.block_shape[2]
    step: gl.constexpr = gradient_map.block_shape[1]
    columns: gl.constexpr = x_map.block_shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    upper = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, half], layout)
    lower = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, half], layout)
    right = gl.allocate_shared_memory(gradient_map.dtype, [stages, step, columns], layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    work = (n_rows, n_columns, samples, n_whole, n_rest, n_parts, share)
    barriers, results, sizes = (full, empty), (weight_gradient, moment, parts), (outputs, inputs)
    gl.warp_specialize(
        [
            (multiply, (results, sizes, upper, right, barriers, work, steps, 0, stages, group)),
            (multiply, (results, sizes, lower, right, barriers, work, steps, 1, stages, group)),
            (fetch, ((gradient_map, x_map), (upper, lower, right), barriers, work, steps, stages, group)),
        ],
        [4, 1],
        [240, 24],  # with 240 left for the first group: 128 * (240 + 240 + 24) registers, of the 65,536 there are
    )


MAP_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def tensor_map(tensor: Tensor, step: int, columns: int, known: bool) -> Map | TensorDescriptor:
    """What the fetching warp reads [B, T, columns] by: boxes of one sample, `step` positions, `columns` columns."""
    if known:
        return Map(tensor, list(tensor.shape), list(tensor.stride()))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, step, columns], MAP_LAYOUT)


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


def launch(
    gradient: Tensor, x: Tensor, dtype: torch.dtype, plan: LinearPlan, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """gradient [B, T, O] and x [B, T, I] in bfloat16 or float16 -> dW [O, I] in dtype, moment [O, I] in float32."""
    (samples, positions, outputs), inputs = gradient.shape, x.shape[2]
    weight_gradient = torch.empty(outputs, inputs, dtype=dtype, device=x.device)
    if place is None or not place.is_contiguous():
        place = torch.empty(outputs, inputs, dtype=torch.float32, device=x.device)
    moment = place
    n_rows, n_columns = -(-outputs // ROWS), -(-inputs // COLUMNS)
    n_rest = n_rows * n_columns - plan.whole
    n_parts = -(-samples // plan.share) if n_rest else 0
    parts = torch.empty(max(n_rest * n_parts, 1), 2, ROWS, COLUMNS, dtype=torch.float32, device=x.device)
    kind = (x.device.index, x.dtype, dtype, plan.step, plan.stages, plan.group, inputs % 16 == 0, inputs == 1)
    known = is_known("linear_grad_moment", kind)
    maps = (
        tensor_map(mappable(gradient), plan.step, HALF_ROWS, known),
        tensor_map(mappable(x), plan.step, COLUMNS, known),
    )
    work = (n_rows, n_columns, samples, plan.whole, n_rest, n_parts, plan.share)
    steps = -(-positions // plan.step)
    arguments = (*maps, weight_gradient, moment, parts, outputs, inputs, steps, *work, plan.stages, plan.group)
    programs = min(max(plan.whole, n_rest * n_parts), plan.programs)
    launch_again("linear_grad_moment", kind, linear_grad_moment_kernel, (programs, 1, 1), arguments, num_warps=4)
    if n_rest:
        tiles = TileCounts(n_rows, n_columns, plan.whole, n_rest, n_parts)
        join_parts(parts, (weight_gradient, moment), (outputs, inputs), tiles, plan.group, at_once=4)
    return weight_gradient, moment

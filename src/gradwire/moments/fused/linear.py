"""Step 1, moments: weight gradient and second moment of a Linear in one pass: the kernel, its launcher, the operator.

    dW = sum_b G_b^T X_b,    moment = sum_b (G_b^T X_b)^2        G [B, T, O], X [B, T, I], both [O, I]

The kernel here runs wherever Triton does. On Hopper half precision goes to hopper.py, and few positions to products.py.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.moments.fused import products
from gradwire.moments.fused.tuning import Plan, Shape, plan_for, refusal

# These change from layer to layer: without this, every layer would be compiled on its own.
SIZES = ["samples", "positions", "n_columns", "share", "part_stride"]


@triton.jit
def _place(outputs, inputs, n_columns, rows: tl.constexpr, columns: tl.constexpr):
    """The rows and columns of this program's tile, and which of them exist."""
    tile = tl.program_id(0)
    row = (tile // n_columns) * rows + tl.arange(0, rows)
    column = (tile % n_columns) * columns + tl.arange(0, columns)
    return row, column, row < outputs, column < inputs


@triton.jit
def _product(left, right, strides, positions, place, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr):
    """G_b^T X_b of one sample for one tile, in float32; left, right: where the sample begins.

    float32 is multiplied in full whatever torch says of tf32: that was no faster here (H200, B16 T1024 3072 x 768:
    3.05 ms against 3.12) and not within 1e-3 of float64.
    """
    row, column, row_in, column_in = place
    product = tl.zeros((rows, columns), tl.float32)
    for start in tl.range(0, positions, step):
        position = start + tl.arange(0, step)
        inside = (position < positions)[:, None]
        far = position[:, None].to(tl.int64)
        deltas = tl.load(left + far * strides[0] + row[None, :], mask=inside & row_in[None, :], other=0.0)
        values = tl.load(right + far * strides[1] + column[None, :], mask=inside & column_in[None, :], other=0.0)
        product = tl.dot(tl.trans(deltas), values, product, input_precision="ieee")
    return product


@triton.jit(do_not_specialize=SIZES)
def linear_grad_moment_kernel(
    gradient,
    x,
    weight_gradient,
    moment,
    samples,
    positions,
    outputs,
    inputs,
    n_columns,
    share,
    part_stride,
    gradient_sample,
    gradient_position,
    x_sample,
    x_position,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """Program (tile, part): the tile's sums over `share` samples; a sample's own product stays in registers."""
    place = _place(outputs, inputs, n_columns, rows, columns)
    strides = (gradient_position, x_position)
    first = tl.program_id(1) * share
    total = tl.zeros((rows, columns), tl.float32)
    squares = tl.zeros((rows, columns), tl.float32)
    for sample in tl.range(first, tl.minimum(first + share, samples)):
        far = tl.cast(sample, tl.int64)
        left, right = gradient + far * gradient_sample, x + far * x_sample
        product = _product(left, right, strides, positions, place, rows, columns, step)
        total += product
        squares += product * product
    part = tl.program_id(1).to(tl.int64) * part_stride
    cells = part + place[0][:, None].to(tl.int64) * inputs + place[1][None, :]
    inside = place[2][:, None] & place[3][None, :]
    tl.store(weight_gradient + cells, total.to(weight_gradient.dtype.element_ty), mask=inside)
    tl.store(moment + cells, squares, mask=inside)


def launch(gradient: Tensor, x: Tensor, dtype: torch.dtype, plan: Plan) -> tuple[Tensor, Tensor]:
    """gradient [B, T, O], x [B, T, I], last dimension contiguous -> dW [O, I] in dtype, moment [O, I] in float32."""
    (samples, positions, outputs), inputs = gradient.shape, x.shape[2]
    share = -(-samples // plan.split)
    n_parts = -(-samples // share)
    partial = torch.float32 if n_parts > 1 else dtype
    weight_gradient = torch.empty(n_parts, outputs, inputs, dtype=partial, device=x.device)
    moment = torch.empty(n_parts, outputs, inputs, dtype=torch.float32, device=x.device)
    n_rows, n_columns = -(-outputs // plan.rows), -(-inputs // plan.columns)
    linear_grad_moment_kernel[(n_rows * n_columns, n_parts)](
        gradient,
        x,
        weight_gradient,
        moment,
        samples,
        positions,
        outputs,
        inputs,
        n_columns,
        share,
        outputs * inputs,
        gradient.stride(0),
        gradient.stride(1),
        x.stride(0),
        x.stride(1),
        rows=plan.rows,
        columns=plan.columns,
        step=plan.step,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    if n_parts == 1:
        return weight_gradient[0], moment[0]
    return weight_gradient.sum(0).to(dtype), moment.sum(0)


def run(
    gradient: Tensor, x: Tensor, dtype: torch.dtype, plan: Plan, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One plan, carried out."""
    if plan.way == "hopper":
        from gradwire.moments.fused import hopper  # Gluon is in Triton's experimental part: only where it is chosen

        return hopper.launch(gradient, x, dtype, plan, place)
    if plan.way == "products":
        return products.launch(gradient, x, dtype)
    return launch(gradient, x, dtype, plan)


def columns_together(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def grad_moment(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """G [B, T, O] or [B, O], X [B, T, I] or [B, I] -> dW [O, I] in dtype, sum_b (G_b^T X_b)^2 [O, I] in float32.

    The operator below without torch's own dispatch, which takes the host longer than a small layer takes an H200.
    """
    if gradient.ndim == 2:
        gradient, x = gradient[:, None], x[:, None]
    if gradient.numel() == 0 or x.numel() == 0:
        zeros = x.new_zeros(gradient.shape[-1], x.shape[-1], dtype=torch.float32)
        return zeros.to(dtype), zeros.clone()
    gradient, x = columns_together(gradient), columns_together(x)
    samples, positions, outputs = gradient.shape
    plan = plan_for(Shape(samples, positions, outputs, x.shape[2]), x.dtype, x.device)
    return run(gradient, x, dtype, plan, place)


@torch.library.custom_op("gradwire::linear_grad_moment", mutates_args=())
def linear_grad_moment(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`grad_moment` for torch.compile."""
    reason = refusal(gradient, x)
    if reason is not None:
        raise ValueError(f"linear_grad_moment: {reason}")
    return grad_moment(gradient, x, dtype)


@linear_grad_moment.register_fake
def _(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (gradient.shape[-1], x.shape[-1])
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)

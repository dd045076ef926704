"""Step 1, moments: Linear and convolutions under torch.compile: weight gradient and moment by one operator.

A layer is an operator that is decomposed when a graph is traced: its forward and the gradient of its input are torch's
own operations, for the compiler to fuse; the gradients of its parameters come from an operator that hands the moment
over on the way. So nothing is copied, and no moment is taken for dead code while its gradient is wanted.
"""

# torch.library and torch.autograd.function have decorators and methods without types.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradwire.moments.layer_call import Tap
from gradwire.moments.operations import Multiply, Operation, operation_of
from gradwire.moments.passes import quietly
from gradwire.moments.swapped_forward import autocast_input
from gradwire.moments.torch_compile.tap_operator import DECOMPOSED, HANDS_OVER, LIBRARY, hand_over

CALL = "int key, str part, bool training, str wanted, int[] numbers"
WEIGHT = "SymInt[] weight_shape, SymInt[] weight_stride, ScalarType dtype"
LIBRARY.define(f"layer(Tensor x, Tensor weight, Tensor? bias, Tensor clock, int axis, {CALL}) -> Tensor")
LIBRARY.define(
    f"layer_backward(Tensor gradient, Tensor x, Tensor clock, {CALL}, {WEIGHT}) -> Tensor[]", tags=HANDS_OVER
)


class OperatorCall(NamedTuple):
    """One layer in a graph: its tap's key and part, the parameters that want a gradient, its operation."""

    key: int
    part: str
    training: bool
    wanted: str
    numbers: Sequence[int]


class Weight(NamedTuple):
    """What is known of a weight where it is not kept; its bias has the same dtype."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype


def is_recorded(x: Tensor, weight: Tensor, bias: Tensor | None, names: Sequence[str], wanted: Collection[str]) -> bool:
    """Every parameter recorded, plain tensors of one dtype."""
    for name, param in zip(names, (weight, bias), strict=True):
        if param is not None and (param.requires_grad != (name in wanted) or param.dtype != weight.dtype):
            return False
    plain = x.layout == torch.strided and x.is_floating_point() and x.device == weight.device
    return plain and names[0] in wanted and x.dtype == autocast_input(weight).dtype


def in_graph(
    module: nn.Module, tap: Tap, x: Tensor, weight: Tensor, bias: Tensor | None, part: str, operation: Operation
) -> Tensor | None:
    """The layer by the operator, where `run_layer` would have it by its Function; None: where a tap must do.

    What depends on sizes is asked later: by `layer` when it is traced, and for the samples' axis when it runs.
    """
    wanted = [name for name in operation.names if name in tap.wanted()]
    if tap.axis is None or not is_recorded(x, weight, bias, operation.names, wanted):
        return None
    call = (tap.key, part, module.training, " ".join(wanted), operation.numbers())
    output: Tensor = torch.ops.gradwire.layer(x, weight, bias, tap.passes.clock, tap.axis, *call)
    return output


class LayerInGraph(torch.autograd.Function):
    """operation(x, weight, bias): dX by torch's own operation, the parameters' gradients by `layer_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, call: OperatorCall) -> Tensor:
        ctx.call, ctx.weight = call, Weight(weight.shape, weight.stride(), weight.dtype)
        with quietly(x.device):
            low, low_bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
            # as in torch, no weight is kept where x wants no gradient: it may be written to before backward
            ctx.save_for_backward(x, clock, *([low] if ctx.needs_input_grad[0] else []))
            return operation_of(call.numbers)(x, low, low_bias).data  # as in eager mode: an in-place ReLU may follow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, clock, *weights = ctx.saved_tensors
        with quietly(x.device):
            made = iter(torch.ops.gradwire.layer_backward(gradients[0], x, clock, *ctx.call, *ctx.weight))
            operation = operation_of(ctx.call.numbers)
            to_input = operation.to_input(gradients[0], x, weights[0]) if weights else None
        return (to_input, *(next(made) if wants else None for wants in ctx.needs_input_grad[1:3]), None, None)


@torch.library.impl(LIBRARY, "layer", DECOMPOSED)
def layer(x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, axis: int, *given: Any) -> Tensor:
    """The layer by the Function above; where that serves no better, by a tap beside torch's own, as in eager mode."""
    call = OperatorCall(*given)
    operation, output = operation_of(call.numbers), None
    if operation.serves(x, weight, axis, x.shape[axis] if x.ndim > axis else 0):
        output = LayerInGraph.apply(x, weight, bias, clock, call)
    else:
        output = torch.ops.gradwire.tap(operation(x, weight, bias), [x], clock, *call[:3])
    assert isinstance(output, Tensor)
    return output


@torch.library.impl(LIBRARY, "layer_backward", "CompositeExplicitAutograd")
def layer_backward(gradient: Tensor, x: Tensor, clock: Tensor, *given: Any) -> list[Tensor]:
    """[dW, dbias], the latter where wanted; on the way the moments are reported."""
    call, weight = OperatorCall(*given[:5]), Weight(*given[5:])
    names = call.wanted.split()
    made = hand_over(gradient, (x,), clock, call[:3], dict.fromkeys(names, weight.dtype))
    found = [made[name] for name in names if name in made]
    if len(found) < len(names):  # a doubt, or its recorder is gone
        found = by_torch(operation_of(call.numbers), gradient, x, weight)[: len(names)]
    return [as_weight(found[0], weight), *found[1:]]


@torch.library.register_fake("gradwire::layer_backward", lib=LIBRARY)
def _(gradient: Tensor, x: Tensor, clock: Tensor, *given: Any) -> list[Tensor]:
    call, weight = OperatorCall(*given[:5]), Weight(*given[5:])
    outputs = gradient.shape[-1 if isinstance(operation_of(call.numbers), Multiply) else 1]
    biases = [x.new_empty(outputs, dtype=weight.dtype) for _ in call.wanted.split()[1:]]
    return [x.new_empty_strided(weight.shape, weight.stride, dtype=weight.dtype), *biases]


def by_torch(operation: Operation, gradient: Tensor, x: Tensor, weight: Weight) -> list[Tensor]:
    """[dW, dbias] without a moment."""
    if isinstance(operation, Multiply):
        rows, inputs = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (gradient, x))
        return [inputs.T @ rows if operation.turned else rows.T @ inputs, rows.sum(0, dtype=weight.dtype)]
    shape, mask = x.new_empty_strided(weight.shape, weight.stride), [False, True, False]
    found = torch.ops.aten.convolution_backward(gradient, x, shape, None, **operation.geometry, output_mask=mask)[1]
    return [found, gradient.sum([0, *range(2, gradient.ndim)], dtype=weight.dtype)]


def as_weight(gradient: Tensor, weight: Weight) -> Tensor:
    """In the parameter's dtype and memory order, as the compiler was told, and as DDP wants it."""
    order = zip(weight.shape, gradient.stride(), weight.stride, strict=True)
    if gradient.dtype == weight.dtype and all(size == 1 or ours == theirs for size, ours, theirs in order):
        return gradient.as_strided(weight.shape, weight.stride)  # an axis of one element has any stride
    return gradient.new_empty_strided(weight.shape, weight.stride, dtype=weight.dtype).copy_(gradient)

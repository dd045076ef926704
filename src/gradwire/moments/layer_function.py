"""Step 1, moments: an autograd Function in place of a layer's own operation: weight gradient and moment together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.operations import Operation
from gradwire.moments.passes import arrives, quietly
from gradwire.moments.swapped_forward import autocast_input
from gradwire.moments.torch_compile.layer_operator import in_graph, is_recorded

Gradients = list[Tensor | None]


class LayerFunction(torch.autograd.Function):
    """operation(x, weight, bias); its backward makes their gradients from the uses that it reports.

    So the work of a weight gradient is done once. How it is made depends on shapes alone and never on what the
    accounts know, so that a resumed run has the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tap,
        part: str,
        call: LayerCall,
        operation: Operation,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        low, low_bias = weight, bias
        if torch.is_autocast_enabled(x.device.type):
            low, low_bias = autocast_input(weight), autocast_input(bias)
        # by save_for_backward and not on ctx: both kinds of checkpoint free only what is saved so. As in torch, no
        # weight is kept where x wants no gradient: it may be written to before backward.
        needs_x = ctx.needs_input_grad[4]
        ctx.save_for_backward(x, *([weight] if needs_x else []), *([low] if needs_x and low is not weight else []))
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.part, ctx.call, ctx.operation = tap, part, call, operation
        ctx.about = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in (weight, bias)]
        # Cast by hand: without gradients autocast's own cache would keep a copy of the weight without its history.
        # .data, since F.linear gives a view where there are positions, and an in-place ReLU may follow.
        with quietly(x.device):
            return operation(x, low, low_bias).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 7
        saved = ctx.saved_tensors  # read once: a checkpoint gives each back only once
        wanted = wanted_by(ctx)
        if torch.is_grad_enabled():
            ctx.tap.report_beside(ctx.part, gradient, (saved[0].detach(),), ctx.call)
            with torch.autocast(gradient.device.type, enabled=False):
                return None, None, None, None, *by_autograd(ctx, gradient, saved, wanted)
        with quietly(gradient.device):
            return None, None, None, None, *by_uses(ctx, gradient, saved, wanted)


def wanted_by(ctx: Any) -> list[bool]:
    """Which of x, weight and bias this backward asks for: autograd.grad(loss, x) does not ask for weights."""
    edges = iter(ctx.next_functions)
    return [
        about is not None and arrives(next(edges)[0]) and needs
        for about, needs in zip([True, *ctx.about], ctx.needs_input_grad[4:], strict=True)
    ]


def by_uses(ctx: Any, gradient: Tensor, saved: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
    """dX by torch's own operation, the parameters' from their uses, and what those could not give by autograd."""
    x, *weights = saved
    asked = {
        name: about[1]
        for name, about, wants in zip(ctx.operation.names, ctx.about, wanted[1:], strict=True)
        if about is not None and wants
    }
    found: dict[str, Tensor] = ctx.tap.report(ctx.part, gradient, (x,), ctx.call, asked) if asked else {}
    to_input = ctx.operation.to_input(gradient, x, weights[-1]) if wanted[0] else None
    if found.keys() != asked.keys():  # a doubt, or its recorder is gone
        return [to_input, *by_autograd(ctx, gradient, saved, [False, *wanted[1:]])[1:]]
    return [to_input, *(found.get(name) for name in ctx.operation.names)]


def by_autograd(ctx: Any, gradient: Tensor, saved: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
    """The operation once more, differentiated as torch does it: for a double backward, and where uses fail."""
    x, *weights = saved
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # What was not saved has no part in its own gradient; views, so that no hook on a parameter fires.
        given = [x, weights[0] if weights else None, None]
        for place, about in enumerate(ctx.about, 1):
            if given[place] is None and about is not None:
                given[place] = gradient.new_zeros(about[0], dtype=about[1]).requires_grad_(wanted[place])
        leaves = [None if tensor is None else tensor.view_as(tensor) for tensor in given]
        low = [None if leaf is None else leaf.to(x.dtype) for leaf in leaves]
        output = ctx.operation(*low)
        chosen = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants and leaf is not None]
        made = torch.autograd.grad(output, chosen, gradient, create_graph=create) if chosen else ()
    results = iter(made)
    return [next(results) if wants else None for wants in wanted]


KINDS = 64  # of inputs remembered by a tap: sequences may come in every length


def run_layer(module: nn.Module, tap: Tap, x: Any, part: str, operation: Operation) -> Tensor | None:
    """The layer by the Function; None: where it may not stand in, or a tap beside torch's own is no worse."""
    weight, bias = module._parameters.get(operation.names[0]), module._parameters.get(operation.names[1])
    if type(x) not in (Tensor, nn.Parameter) or type(weight) is not nn.Parameter:  # None, or a subclass of Tensor
        return None
    x = autocast_input(x)
    if torch.compiler.is_compiling():
        return in_graph(module, tap, x, weight, bias, part, operation)
    if tap.mismatch is not None:
        return None
    now, wanted, lowered = tap.passes.now(), tap.wanted(), torch.is_autocast_enabled(x.device.type)
    call = tap.call(part, x, now, wanted)  # its output has as many dims
    if call.axis is None:
        return None
    # a checkpoint that recomputes this must come to the same: what is in doubt by then was not before
    key = (x.shape, x.dtype, x.device, x.layout, weight.dtype, weight.device, wanted, now.batch, lowered)
    fit = tap.fitting.get(key)
    if fit is None:
        if len(tap.fitting) >= KINDS:
            tap.fitting.clear()
        fit = tap.fitting[key] = fits(call, x, weight, bias, operation)
    if not fit:
        return None
    output: Tensor = LayerFunction.apply(tap, part, call, operation, x, weight, bias)  # type: ignore[no-untyped-call]
    return output


def fits(call: LayerCall, x: Tensor, weight: Tensor, bias: Tensor | None, operation: Operation) -> bool:
    """Every parameter recorded here, and the samples where they are looked for."""
    if call.axis is None or call.samples is None or not is_recorded(x, weight, bias, operation.names, call.wanted):
        return False
    batched = x.ndim > call.axis and x.shape[call.axis] == call.batch
    return batched and operation.serves(x, weight, call.axis, call.samples)

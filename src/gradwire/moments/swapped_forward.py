"""Step 1, moments: a layer's forward swapped for one that watches its output: what flows back there is reported.

The layer computes as before, bit for bit; parameters, state dict and hooks stay where they are.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.passes import transformed

ATTRIBUTE = "_gradwire_tap"


class Watch(torch.autograd.Function):
    """The identity; its backward reports a use. Weight gradients stay torch's own, bit for bit."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tap, part: str, call: LayerCall, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)  # and not on ctx: both kinds of checkpoint free only what is saved so
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.part, ctx.call, ctx.count = tap, part, call, len(saved)
        # .data and not a view: an in-place ReLU may follow. No layer here saves its own output.
        return output.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is not None:
            # read once: a checkpoint gives each saved tensor back only once
            ctx.tap.report_beside(ctx.part, gradient, ctx.saved_tensors, ctx.call)
        return (gradient, None, None, None, *[None] * ctx.count)


def watch(tap: Tap, output: Tensor, saved: Sequence[Tensor], part: str = "") -> Tensor:
    """ModelPasses a layer's output on, and has its gradient reported together with the saved inputs."""
    if torch.compiler.is_compiling():
        training = tap.module is not None and tap.module.training
        watched: Tensor = torch.ops.gradwire.tap(output, list(saved), tap.passes.clock, tap.key, part, training)
        return watched
    if tap.passes.following is not None:
        tap.passes.following.note(tap, part, output)
        return output
    if not output.requires_grad:
        return output
    call = tap.call(part, output, tap.passes.now(), tap.wanted())
    result: Tensor = Watch.apply(output, tap, part, call, *saved)  # type: ignore[no-untyped-call]
    return result


def autocast_input(x: Any) -> Any:
    """What autocast would make of a layer's input: saved once, not once as it is and once as the layer saves it."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def plain_forward(module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward of one input, and the tap on its output."""
    named = dict(kwargs)
    if not args and tap.input not in named:
        return type(module).forward(module, **named)  # which says what is missing
    x = args[0] if args else named.pop(tap.input or "")
    if tap.layer is not None and tap.layer.casts:
        x = autocast_input(x)
    output = type(module).forward(module, x, *args[1:], **named)
    # A bias needs no input: with frozen weights nothing is kept alive for it.
    return watch(tap, output, (x,) if tap.wanted() - {"bias"} else ())


# The name matters: a bound method is copied and pickled by the name of its function, so that a deep copy (an EMA
# model) gets this forward bound to itself, and an unpickled model gets its class's own.
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a watched module: its own, with the output tapped while someone listens."""
    tap: Tap = getattr(self, ATTRIBUTE)
    if not tap or not tap.live:
        return type(self).forward(self, *args, **kwargs)
    following = tap.passes.following is not None
    if not following and (not torch.is_grad_enabled() or transformed()):
        return type(self).forward(self, *args, **kwargs)
    # torch.func.functional_call puts other tensors in the parameters' places: not ours to record.
    own = all(held(self, name) is account.here for name, account in tap.accounts.items())
    if (own or following) and tap.layer is not None and (following or tap.wanted()):
        result = (tap.layer.forward or plain_forward)(self, tap, *args, **kwargs)
    else:
        result = type(self).forward(self, *args, **kwargs)
    if tap.after is not None and not torch.compiler.is_compiling():
        return tap.after(self, tap, result)
    return result


def held(module: nn.Module, name: str) -> Any:
    """The parameter of that name, which may be dotted: that of a module within."""
    return module.get_parameter(name) if "." in name else module._parameters.get(name)


def is_free(module: nn.Module) -> bool:
    """Whether forward can be swapped: it is the class's own, or a dead copy's of ours."""
    mine = module.__dict__.get("forward")
    if mine is None:
        return True
    function = getattr(mine, "__func__", None)
    tap = module.__dict__.get(ATTRIBUTE)
    return function is type(module).forward or (function is forward and not (tap and tap.live))


def install(module: nn.Module, tap: Tap) -> None:
    setattr(module, ATTRIBUTE, tap)
    module.forward = types.MethodType(forward, module)


def uninstall(module: nn.Module, tap: Tap) -> None:
    """Restores the class's forward, unless someone swapped it again over ours."""
    tap.live = False
    ours = getattr(module.__dict__.get("forward"), "__func__", None) is forward
    if ours and module.__dict__.get(ATTRIBUTE) is tap:
        delattr(module, ATTRIBUTE)
        del module.__dict__["forward"]

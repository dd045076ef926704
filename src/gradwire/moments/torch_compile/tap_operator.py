"""Step 1, moments: the tap as operators, for torch.compile, which refuses autograd Functions under DDP.

The operators of a forward are decomposed when a graph is traced: what is left of them are their backwards, in which
`stage` is an operator that the compiler cannot look into.
"""

# torch.library has decorators and methods without types.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.batch_axis import COMPILED
from gradwire.moments.layer_call import NOTHING, TAPS, LayerCall
from gradwire.moments.passes import PASSES, UNKNOWN

LIBRARY = torch.library.Library("gradwire", "FRAGMENT")  # its operators live as long as it does
DECOMPOSED = "CompositeImplicitAutograd"
# Python is run that no captured graph would run again; and any memory order is read, so that nothing is copied for it.
HANDS_OVER = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout)


@torch.library.custom_op("gradwire::begin", mutates_args=())
def begin(clock: Tensor, key: int, batch: int, tokens: int) -> Tensor:
    """A forward pass begins: its clock, known only at run time, which all taps save.

    It is made of the last one, so that two passes in one graph are not taken for one.
    """
    passes = PASSES.get(key)
    if passes is None:
        return clock.clone()
    passes.batch_axis.give_up(COMPILED)
    passes.batch_axis.square = batch == tokens
    passes.begin(None if batch == UNKNOWN else batch, None if tokens == UNKNOWN else tokens)
    return passes.clock


@begin.register_fake
def _(clock: Tensor, key: int, batch: int, tokens: int) -> Tensor:
    return torch.empty_like(clock)


class Watched(torch.autograd.Function):
    """The identity; its backward reports a use."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, clock: Tensor, about: tuple[int, str, bool], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(clock, *saved)
        ctx.about = about
        return output.data  # as in eager mode: an in-place ReLU may follow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        clock, *saved = ctx.saved_tensors
        zero = torch.ops.gradwire.stage(gradients[0], saved, clock, *ctx.about)
        return (gradients[0] + zero, None, None, *[None] * len(saved))


LIBRARY.define("tap(Tensor output, Tensor[] saved, Tensor clock, int key, str part, bool training) -> Tensor")


@torch.library.impl(LIBRARY, "tap", DECOMPOSED)
def tap(output: Tensor, saved: Sequence[Tensor], clock: Tensor, key: int, part: str, training: bool) -> Tensor:
    """The output, watched."""
    watched: Tensor = Watched.apply(output, clock, (key, part, training), *saved)
    return watched


LIBRARY.define(
    "stage(Tensor gradient, Tensor[] saved, Tensor clock, int key, str part, bool training) -> Tensor", tags=HANDS_OVER
)


@torch.library.impl(LIBRARY, "stage", "CompositeExplicitAutograd")
def stage(gradient: Tensor, saved: Sequence[Tensor], clock: Tensor, key: int, part: str, training: bool) -> Tensor:
    """Reports the use. The answer is a zero to be added to the gradient, without which all this would be dead code.

    -0.0 leaves every bit as it is, and is added by whatever kernel reads the gradient next.
    """
    hand_over(gradient, saved, clock, (key, part, training))
    return gradient.new_full((), -0.0)


@torch.library.register_fake("gradwire::stage", lib=LIBRARY)
def _(gradient: Tensor, saved: Sequence[Tensor], clock: Tensor, key: int, part: str, training: bool) -> Tensor:
    return gradient.new_empty(())


def hand_over(
    gradient: Tensor,
    saved: Sequence[Tensor],
    clock: Tensor,
    about: tuple[int, str, bool],
    asked: Mapping[str, torch.dtype] = NOTHING,
) -> dict[str, Tensor]:
    """Reports the uses of one call of a layer to its tap, and gives the asked gradients back.

    about: the tap's key, the layer's part, whether it trains. The buffers are used again afterwards by others: where
    uses may have to be merged, they are copied.
    """
    key, part, training = about
    tap = TAPS.get(key)
    if tap is None or not tap.live:
        return {}
    passed, batch = clock.tolist()
    keeps = tap.keeps()
    call = LayerCall(passed, None if batch == UNKNOWN else batch, tap.axis, training, tap.wanted(), at_once=not keeps)
    tap.locate(call, part, gradient)
    if keeps:
        gradient, saved = gradient.clone(), [tensor.clone() for tensor in saved]
    tap.passes.reach_by_tap(passed, call.batch)
    return tap.report_beside(part, gradient, tuple(saved), call, asked)

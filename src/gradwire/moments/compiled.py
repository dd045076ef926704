"""Step 1, moments: the tap as custom operators, for torch.compile, which refuses autograd Functions under DDP."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.moments.site import Site
from gradwire.moments.tap import TAPS

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder

RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()
UNKNOWN = -1  # a batch size that is None


@torch.library.custom_op("gradwire::begin", mutates_args={"clock"})
def begin(clock: Tensor, key: int, batch: int, tokens: int) -> None:
    """A forward pass begins. The clock is written so that every tap, which reads it, comes after."""
    recorder = RECORDERS.get(key)
    if recorder is not None:
        recorder.begin(None if batch == UNKNOWN else batch, None if tokens == UNKNOWN else tokens)


@begin.register_fake
def _(clock: Tensor, key: int, batch: int, tokens: int) -> None:
    return None


@torch.library.custom_op("gradwire::tap", mutates_args=())
def tap(
    output: Tensor, saved: Sequence[Tensor], clock: Tensor, key: int, part: str, training: bool
) -> tuple[Tensor, Tensor]:
    """(a copy of the output, a mark): the mark holds the pass and its batch size, known only at run time."""
    found = TAPS.get(key)
    passed, batch = (0, None) if found is None else (found.recorder.passes, found.recorder.batch)
    return output.clone(), torch.tensor([passed, UNKNOWN if batch is None else batch])


@tap.register_fake
def _(
    output: Tensor, saved: Sequence[Tensor], clock: Tensor, key: int, part: str, training: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("gradwire::stage", mutates_args=())
def stage(gradient: Tensor, saved: Sequence[Tensor], mark: Tensor, key: int, part: str, training: bool) -> Tensor:
    """A copy of the gradient; on the way the use is staged. Its buffers are used again afterwards by others."""
    found = TAPS.get(key)
    if found is not None and found.live:
        passed, batch = mark.tolist()
        site = Site(passed, None if batch == UNKNOWN else batch, found.axis, training, found.wanted(), compiled=True)
        kept, inputs = gradient, tuple(saved)
        if found.keeps():
            kept, inputs = gradient.clone(), tuple(tensor.clone() for tensor in saved)
        found.recorder.reach_by_tap(passed, site.batch)
        found.stage(part, kept, inputs, site)
    return gradient.clone()


@stage.register_fake
def _(gradient: Tensor, saved: Sequence[Tensor], mark: Tensor, key: int, part: str, training: bool) -> Tensor:
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, saved, _, ctx.key, ctx.part, ctx.training = inputs
    ctx.save_for_backward(output[1], *saved)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    mark, *saved = ctx.saved_tensors
    passed_on = torch.ops.gradwire.stage(gradient, saved, mark, ctx.key, ctx.part, ctx.training)
    return passed_on, [None] * len(saved), None, None, None, None


tap.register_autograd(_backward, setup_context=_setup)

"""The error feedback of local steps: whatever a round does not send waits, what rounding cut off included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.local_steps.recipe import Recipe
from gradwire.methods.base import Arrival, Compressor, Context, Gather, Message
from gradwire.methods.residual import WithResidual
from gradwire.methods.vgc import VGC


def with_error_feedback(method: Compressor) -> Compressor:
    """The method such that its `residual` is e: e += delta, e -= what the message says.

    A method that holds something back has that already, VGC with its option `feedback`. One that is gathered and holds
    nothing back is given it. Sums have none: what a smaller precision cuts off is lost.
    """
    if isinstance(method, VGC):
        exact = method.tau is not None or method.momentum  # sends just what it takes off; or stops where it sends
        return method if exact else replace(method, feedback=True)
    if method.holds_back or not isinstance(method, Gather):
        return method
    return ErrorFeedback(method)


def method_of(recipe: Recipe, fragments: int) -> Compressor:
    """What encodes an exchange of one of so many fragments; max_bytes_per_step is of an inner step on average."""
    method: Any = with_error_feedback(recipe.compressor)
    if method.most_bytes is not None:
        method = replace(method, max_bytes_per_step=method.most_bytes * recipe.every // fragments)
    return method  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ErrorFeedback(WithResidual, Gather):
    """A method that holds nothing back, with what its messages do not say in `residual`."""

    method: Gather

    @property
    def alike(self) -> bool:
        return self.method.alike

    def encode(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> Message:
        """e += delta; the message says e; e -= what the message says."""
        residual = state.residual
        residual += context.only(grad)
        before = residual.clone()
        message = self.method.encode(context.only(before), moment, None, context)
        said = torch.empty_like(before)
        self.method.decode(message.data[None], said, context)
        residual -= said
        return replace(message, undo=lambda: residual.copy_(before))

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        return self.method.decode(messages, out, context)

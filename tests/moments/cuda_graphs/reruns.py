"""What stands in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.moments import Recorder


class Rerun(torch.autograd.Function):
    """A graph's stand-in on a CPU: runs again, and writes to the same memory."""

    @staticmethod
    def forward(ctx: Any, static: StandIn, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.static = static
        for own, given in zip(static.inputs, inputs, strict=True):
            own.data.copy_(given)
        static.forward()
        return tuple(output.detach() for output in static.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        static = ctx.static
        static.backward(gradients)
        found = iter(static.gradients)
        return None, *[next(found).detach() if one.requires_grad else None for one in static.inputs]


class StandIn:
    """make_graphed_callables for one tensor out, on a CPU: the moments of a rerun go where those of the first lie."""

    def __init__(self, run: Callable[..., Tensor], sample: Sequence[Tensor], recorder: Recorder) -> None:
        self.run, self.recorder, self.capturing = run, recorder, recorder.passes.capturing
        self.parameters = [one for one in sample if one.requires_grad]
        self.inputs = [one if one.requires_grad else one.clone() for one in sample]
        self.gradients: list[Tensor] = []
        self.forward()
        self.backward([torch.ones_like(one) for one in self.outputs])

    def forward(self) -> None:
        now, self.recorder.passes.capturing = self.recorder.passes.capturing, self.capturing
        with torch.enable_grad():
            self.outputs = [self.run(*self.inputs)]
        self.recorder.passes.capturing = now

    def backward(self, gradients: Sequence[Tensor]) -> None:
        now, self.recorder.passes.capturing = self.recorder.passes.capturing, self.capturing
        held = dict(self.capturing.moments) if self.gradients else {}
        found = torch.autograd.grad(self.outputs, self.parameters, list(gradients))
        if self.gradients:
            for own, new in zip(self.gradients, found, strict=True):
                own.data.copy_(new)
            for name, settled in held.items():
                settled.finished.copy_(self.capturing.moments[name].finished)
            self.capturing.moments = held
        else:
            self.gradients = [one.detach().clone() for one in found]
        self.recorder.passes.capturing = now

    def __call__(self, *args: Tensor) -> Tensor:
        self.parameters = [one for one in args if one.requires_grad]
        return Rerun.apply(self, *args)[0]

"""One of several workers in one process: a module of its own, over the parameters of all of them or its own. Step 1."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError, GradwireError
from gradwire.layout import Layout, in_shape
from gradwire.moments import Recorder
from gradwire.moments.cuda_graphs.captured_moments import CapturedMoments
from gradwire.moments.cuda_graphs.graphed_forward import stand_ins

Loss = Callable[..., Tensor]  # (module, *batch) -> the worker's loss
UNUSED = (
    "{names} got no gradient: in a simulation every parameter takes part in every step, as in a DDP model without "
    "find_unused_parameters; freeze it with requires_grad_(False)"
)


class VirtualWorker:
    """Its parameters have the memory of the model's; its buffers, gradient and second moment are its own.

    gradient, moment: [N], where they go; the moment is empty where the method needs none.
    options: of the recorder; buffers: whether it writes to the model's own buffers, as rank 0 does.
    weights: [N], where the parameters that are trained lie, if not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        gradient: Tensor,
        moment: Tensor,
        options: dict[str, Any],
        buffers: bool,
        weights: Tensor | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        places = {} if weights is None else {s.name: in_shape(s.of(weights), named[s.name]) for s in layout}
        shared: dict[int, Any] = {
            id(p): nn.Parameter(places.get(name, p.detach()), p.requires_grad) for name, p in named.items()
        }
        if buffers:
            shared |= {id(buffer): buffer for buffer in model.buffers()}
        self.module = copy.deepcopy(model, shared)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.gradient, self._slots = gradient, layout.slots
        self._places = [in_shape(slot.of(self.gradient), self.parameters[slot.name]) for slot in layout]
        self.recorder: Recorder | None = None
        if moment.numel():
            self.recorder = Recorder(self.module, self.parameters, **options)
            for slot in layout:
                self.recorder.bind(slot.name, slot.of(moment))

    def backward(self, loss: Loss, batch: Sequence[Tensor]) -> Tensor:
        """One pass: gradient and moment lie in their places after it. Returns the loss."""
        for parameter in self.parameters.values():
            parameter.grad = None
        value = loss(self.module, *batch)
        value.backward()  # type: ignore[no-untyped-call]
        self._collect([self.parameters[slot.name].grad for slot in self._slots])
        if self.recorder is not None:
            for slot in self._slots:
                self.recorder.consume(slot.name, slot.of(self.gradient))
        return value.detach()

    def hand_over(self) -> None:
        """The gradient of the last pass, for an optimizer: also of a pass that ran as a graph."""
        for slot, place in zip(self._slots, self._places, strict=True):
            self.parameters[slot.name].grad = place

    def _collect(self, gradients: Sequence[Tensor | None]) -> None:
        found = [one for one in gradients if one is not None]
        if len(found) < len(gradients):
            names = [slot.name for slot, one in zip(self._slots, gradients, strict=True) if one is None]
            raise GradwireError(UNUSED.format(names=", ".join(names)))
        torch._foreach_copy_(self._places, found)

    # ---- as a part of a CUDA graph

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Nothing that runs in here is a step: buffers and the recorder are as before after it."""
        held = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        if self.recorder is not None:
            self.recorder.passes.capturing = CapturedMoments(self.recorder)
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.passes.capturing = None
                self.recorder.passes.begin_step(self.recorder.passes.step)
            with torch.no_grad():
                for buffer, value in held:
                    buffer.copy_(value)

    def survey(self, loss: Loss, batch: Sequence[Tensor]) -> None:
        """Passes before the capture: they compile, and tell which parameters are used more than once."""
        if self.recorder is None or self.recorder.passes.capturing is None:
            for _ in range(2):
                torch.autograd.grad(loss(self.module, *batch), list(self.parameters.values()), allow_unused=True)
            return
        self.recorder.passes.capturing.survey(lambda *given: loss(self.module, *given), batch)

    def record(self, loss: Loss, batch: Sequence[Tensor]) -> Tensor:
        """The pass that is captured: what `backward` does, on the stream and in the memory of the graph."""
        with stand_ins(self.module, self.recorder) as parameters:
            trained = [one for one in parameters if one.requires_grad]
            value = loss(self.module, *batch)
            found = torch.autograd.grad(value, trained, allow_unused=True)
        self._collect(found)
        if self.recorder is not None:
            self._collect_moments(self.recorder)
        return value.detach()

    def _collect_moments(self, recorder: Recorder) -> None:
        capturing = recorder.passes.capturing
        assert capturing is not None
        if not capturing.complete():
            missing = [name for name in self.parameters if name not in capturing.moments or name in capturing.doubts]
            raise AttachError(
                f"the second moments of {', '.join(missing)} can only be estimated, and estimates cannot be captured: "
                "simulate(..., capture=False)"
            )
        moments = [capturing.moments[slot.name].finished for slot in self._slots]
        torch._foreach_copy_([recorder.accounts[slot.name].in_place() for slot in self._slots], moments)

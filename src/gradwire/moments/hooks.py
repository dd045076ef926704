"""Step 1, moments: the hooks of a model: a forward pass begins, and it put this out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradwire.errors import AttachError
from gradwire.moments.batch_axis import tensors_in
from gradwire.moments.passes import transformed

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder


class _Hook:
    """A hook of the root. A copied or pickled model keeps one that does nothing, and no recorder."""

    __name__ = "gradwire_hook"  # torch.jit asks every hook for its name, and then for its source

    @property
    def __globals__(self) -> dict[str, Any]:
        raise AttachError("torch.jit.script reads a model's source, which taps have none of; wire.detach() first")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # takes three arguments, returns None, and loads where gradwire is not installed
        return getattr, (nullcontext(), "__exit__")


class PassHook(_Hook):
    """Before the root's forward: a pass begins."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.on_forward(module, args, kwargs)


class OutputHook(_Hook):
    """After the root's forward: has the passes told when a backward reaches this one."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or transformed() or not torch.is_grad_enabled():
            return
        reached = self.recorder.passes.output_hook()
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

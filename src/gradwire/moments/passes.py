"""Step 1, moments: the hooks that start a forward pass and hear of a gradient, and the batch size they read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError
from gradwire.moments.tap import transformed

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder


def batch_size(given: Any, axis: int | None) -> int | None:
    """The size of that axis of the first tensor among nested arguments; None where there is none."""
    tensor = first_tensor(given)
    return None if tensor is None or axis is None or tensor.ndim <= axis else tensor.shape[axis]


def token_count(given: Any) -> int | None:
    """T where the model is called on token ids [B, T, ..]; None otherwise."""
    tensor = first_tensor(given)
    if tensor is None or tensor.ndim < 2 or tensor.is_floating_point() or tensor.is_complex():
        return None
    return None if tensor.dtype == torch.bool else tensor.shape[1]


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors among nested outputs."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for item in given:
            yield from tensors_in(item)


def first_tensor(given: Any) -> Tensor | None:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for item in given:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


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
        self.recorder.on_forward(args, kwargs)


class OutputHook(_Hook):
    """After the root's forward: has the recorder told when a backward reaches this pass."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or transformed() or not torch.is_grad_enabled():
            return
        told = reached(self.recorder)
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(told)  # type: ignore[no-untyped-call]


def reached(recorder: Recorder) -> Callable[[Tensor], None]:
    """Keeps no recorder alive: the graph may outlive it."""
    found, passed = weakref.ref(recorder), recorder.current

    def call(gradient: Tensor) -> None:
        alive = found()
        if alive is not None:
            alive.reach(passed)

    return call


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A parameter's hook that keeps nothing alive: Python cannot collect cycles through autograd's hooks."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    return call

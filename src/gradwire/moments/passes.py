"""Step 1, moments: the hooks that start a forward pass and hear of a gradient, and the batch size they read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder


def batch_size(given: Any, axis: int | None) -> int | None:
    """The size of that axis of the first tensor among nested arguments; None where there is none."""
    tensor = first_tensor(given)
    return None if tensor is None or axis is None or tensor.ndim <= axis else tensor.shape[axis]


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


class PassHook:
    """The root's forward pre-hook. A copied or pickled model keeps a hook that does nothing, and no recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.on_forward(args, kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # takes three arguments, returns None, and loads where gradwire is not installed
        return getattr, (nullcontext(), "__exit__")


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A parameter's hook that keeps nothing alive: Python cannot collect cycles through autograd's hooks."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    return call

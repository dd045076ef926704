"""Step 1, moments: a hook of a model that a copy of it does not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gradwire.errors import AttachError


class Hook:
    """A hook of the root. A copied or pickled model keeps one that does nothing, and no recorder."""

    __name__ = "gradwire_hook"  # torch.jit asks every hook for its name, and then for its source

    @property
    def __globals__(self) -> dict[str, Any]:
        raise AttachError("torch.jit.script reads a model's source, which taps have none of; wire.detach() first")

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> None:
        self.call(*given)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # takes three arguments, returns None, and loads where gradwire is not installed
        return getattr, (nullcontext(), "__exit__")

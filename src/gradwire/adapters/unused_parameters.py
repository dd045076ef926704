"""Which parameters had a gradient in a step, for methods without moments: DDP hands over zeros for those that had none.

What is held back of a parameter that nobody used must not be sent: DDP drops the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle


class UnusedParameters:
    """Listens only where DDP looks for unused parameters; otherwise every parameter has a gradient in every step."""

    def __init__(self, looked_for: bool) -> None:
        self._looked_for = looked_for
        self._handles: list[RemovableHandle] = []
        self.listens = False
        self._arrived: set[str] = set()

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on these and no others."""
        for handle in self._handles:
            handle.remove()
        watched = parameters.items() if self._looked_for else ()
        self._handles = [self._listen(name, parameter) for name, parameter in watched]
        self.listens = bool(self._handles)

    def _listen(self, name: str, parameter: nn.Parameter) -> RemovableHandle:
        return parameter.register_post_accumulate_grad_hook(lambda _: self._arrived.add(name))  # type: ignore[no-untyped-call,no-any-return]

    def seen(self, names: Sequence[str]) -> list[bool]:
        """Whether each had a gradient since it was last asked for."""
        found = [name in self._arrived for name in names]
        self._arrived.difference_update(names)
        return found

"""Step 1, moments: the hooks that start a forward pass and hear of a gradient, and the batch size they read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError
from gradwire.moments.batch_axis import tensors_in
from gradwire.moments.tap import transformed

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gradwire.moments.ledger import Ledger
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


class Ears:
    """The hooks on the parameters of a recorder; without them while a captured graph commits by itself."""

    def __init__(self, ledgers: Mapping[str, Ledger]) -> None:
        self._ledgers = ledgers
        self._handles: dict[str, list[RemovableHandle]] = {}

    @property
    def closed(self) -> bool:
        return not self._handles

    def open(self) -> None:
        """Hears of every gradient; again where `close` has ended that."""
        if self._handles:
            return
        for name, ledger in self._ledgers.items():
            param: Any = ledger.param  # torch's hook methods carry no types
            wants = param.requires_grad
            param.requires_grad_(True)  # a hook on a frozen parameter is refused, though it may be thawed later
            self._handles[name] = [param.register_post_accumulate_grad_hook(weakly(ledger.on_accumulated))]
            if ledger.estimated:
                self.hear_more(ledger)
            param.requires_grad_(wants)

    def hear_more(self, ledger: Ledger) -> None:
        """Of this parameter also before its gradient is accumulated."""
        handles = self._handles[ledger.name]
        if len(handles) == 1:
            handles.append(ledger.param.register_hook(weakly(ledger.on_gradient)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

"""Who wants to know when a torch optimizer has stepped."""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """Told of every optimizer, its own or not."""

    def on_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """As long as it lives."""
    _listeners.add(listener)
    _hook()


@functools.cache
def _hook() -> None:
    """One for all and for good: removing one while torch runs through its hooks makes that step fail."""

    def stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for listener in list(_listeners):
            listener.on_optimizer(optimizer)

    register_optimizer_step_post_hook(stepped)

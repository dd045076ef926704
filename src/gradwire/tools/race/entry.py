"""A method on the start: the model as its training calls it, and what the race asks of it while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn

Sent = Callable[[int], int | None]  # bytes handed to the collectives after so many steps; None: nobody counts them
Waited = Callable[[], float | None]  # seconds that the training stood still for the exchange; None: nobody knows


def nothing() -> None:
    """Most methods need no call of their own."""


def always() -> bool:
    return True


@dataclass(frozen=True)
class RaceEntry:
    """What a function `python:module.function` of local steps returns; the defaults are those of a hook of DDP."""

    net: nn.Module  # what the training calls
    sent: Sent = lambda steps: None
    after_step: Callable[[], None] = nothing  # of the optimizer
    shared: Callable[[], AbstractContextManager[None]] = nullcontext  # in it the model has the weights to be tested
    rests: Callable[[], bool] = always  # whether nothing is on its way
    wait: Callable[[], None] = nothing  # until nothing is
    warm: Callable[[], None] = nothing  # an exchange, after the steps of the model that is thrown away
    close: Callable[[], None] = nothing
    waited: Waited = lambda: None

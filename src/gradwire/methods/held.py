"""What the methods share that hold something back: the residual in a step in which everything is sent."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.layout import Layout
from gradwire.methods.base import Context, Outcome, Rounds, powers


@dataclass
class Residual:
    """One number an element that never leaves the worker."""

    residual: Tensor = field(metadata={"power": 1})  # r: computed and not yet sent


class Held:
    """`waiting` and `clear` for a state with a residual."""

    needs_moments: ClassVar[bool] = False

    @property
    def holds_back(self) -> bool:
        return True

    def init(self, layout: Layout, device: torch.device) -> Any:
        return Residual(torch.zeros(layout.numel, dtype=torch.float32, device=device))

    def waiting(self, state: Any, context: Context) -> Tensor:
        """r of the tensors that have a gradient in this step; DDP drops the result of one that nobody used."""
        return state.residual.clone() if context.active is None else context.only(state.residual)

    def clear(self, state: Any, context: Context) -> None:
        """All that goes with what `waiting` gave is zero."""
        for name, power in powers(state).items():
            if power > 0:
                tensor = getattr(state, name)
                if context.active is None:
                    tensor.zero_()
                else:
                    tensor.masked_fill_(context.layout.spread(context.active), 0.0)


@dataclass
class Nothing:
    """The state of a method that holds nothing back."""


class Free:
    """For methods that send all they are given, to rounding: no state."""

    needs_moments: ClassVar[bool] = False
    holds_back: ClassVar[bool] = False

    def init(self, layout: Layout, device: torch.device) -> Nothing:
        return Nothing()

    def waiting(self, state: Nothing, context: Context) -> Tensor:
        raise AssertionError("nothing is held back")

    def clear(self, state: Nothing, context: Context) -> None:
        raise AssertionError("nothing is held back")


def everything(method: Rounds[Any], grad: Tensor, state: Any, context: Context) -> Generator[Tensor, Tensor, Outcome]:
    """A step of a method of sums in which all that is held back goes out with the gradient."""
    whole = context.only(grad) + method.waiting(state, context)
    norm = whole.abs().sum()
    mean = yield whole.mul_(1 / context.world_size)
    good = context.only(torch.where(torch.isfinite(grad), grad, 0.0))
    return Outcome(mean, torch.isfinite(mean).all(), lambda: state.residual.add_(good), None, norm)

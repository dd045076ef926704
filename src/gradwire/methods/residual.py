"""What the methods share that hold something back: the residual, also in a step in which everything is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.layout import Layout
from gradwire.methods.base import Compressor, Context, powers


@dataclass
class Residual:
    """One number an element that never leaves the worker."""

    residual: Tensor = field(metadata={"power": 1})  # r: computed and not yet sent


class WithResidual(Compressor):
    """A method whose state has the field `residual`."""

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
                context.clear(getattr(state, name))

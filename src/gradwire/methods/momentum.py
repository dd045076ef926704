"""Momentum in what is held back, as in Deep Gradient Compression (Lin et al., arXiv:1712.01887).

u = m u + g goes into the residual in the place of g, and u = 0 where an element is sent: what has arrived late is not
pushed further in a direction that the others have left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.methods.base import Context
from gradwire.methods.residual import Residual


@dataclass
class Velocity(Residual):
    """The residual, and the momentum that goes into it."""

    velocity: Tensor = field(metadata={"power": 1})  # u


def check_momentum(method: str, momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"{method}: momentum must be in [0, 1), got {momentum}")


def quicken(velocity: Tensor, grad: Tensor, momentum: float, context: Context) -> Tensor:
    """u = m u + g; returns what goes into the residual: u itself. Tensors without a gradient keep theirs."""
    active = context.active
    kept = momentum if active is None else context.layout.spread(torch.where(active, momentum, 1.0))
    # two roundings: whether a product and a sum are fused depends on the place in the bucket
    velocity.mul_(kept).add_(context.only(grad))
    return context.only(velocity)


def halted(undo: Callable[[], None], index: Tensor, real: Tensor, velocity: Tensor) -> Callable[[], None]:
    """u = 0 where something is sent: at the places `index` [M] that are `real`.

    Returns an undo that gives that back too, and lets u begin anew where a bad value came to it.
    """
    lost = torch.where(real, velocity[index], 0.0)
    velocity.index_add_(0, index, lost, alpha=-1)

    def put_back() -> None:
        undo()
        velocity.index_add_(0, index, lost).nan_to_num_(0.0, 0.0, 0.0)

    return put_back

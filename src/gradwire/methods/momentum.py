"""Momentum in what is held back, as in Deep Gradient Compression (Lin et al., arXiv:1712.01887).

u = m u + g goes into the residual in the place of g, and u = 0 where an element is sent: what has arrived late is not
pushed further in a direction that the others have left.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.codec import CHUNK, Selection
from gradwire.methods.base import Context


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


def halted(chosen: Selection, velocity: Tensor, chunk: int) -> Selection:
    """u = 0 where `chosen` sends; its undo gives that back too, and lets u begin anew where a bad value came to it."""
    index, real = _places(chosen, chunk)
    lost = torch.where(real, velocity[index], 0.0)
    velocity.index_add_(0, index, lost, alpha=-1)

    def undo() -> None:
        chosen.undo()
        velocity.index_add_(0, index, lost).nan_to_num_(0.0, 0.0, 0.0)

    return replace(chosen, undo=undo)


def _places(chosen: Selection, chunk: int) -> tuple[Tensor, Tensor]:
    """Where the words go, and which of them are there at all: how many is known on the device alone."""
    number = torch.arange(len(chosen.words), device=chosen.words.device)
    ends = chosen.counts.long().cumsum(0)
    owner = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
    return (chosen.words & (CHUNK - 1)).long() + owner * chunk, number < ends[-1]

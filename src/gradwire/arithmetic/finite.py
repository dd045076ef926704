"""Numbers that can be used, of a gradient and of another rank's message."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


def sifted(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(zeros where it is not finite, bool [] whether it is finite everywhere); grad itself if that is quickly said."""
    everywhere = torch.isfinite(grad.sum())
    # 0.2 ms instead of 8 for 2.6 M elements on a core of an EPYC; on a GPU somebody would wait for the answer. A sum of
    # finite values that overflows only takes the longer way.
    if grad.device.type == "cpu" and everywhere:
        return grad, everywhere
    each = torch.isfinite(grad)
    return torch.where(each, grad, 0.0), each.all()


def unsound(scales: Tensor) -> Tensor:
    """bool: scales [..., G] that no rank can have sent: below zero, infinite or no number."""
    return ~((scales >= 0) & (scales <= LARGEST)).all(-1)

"""What of a gradient can be used: a value that is not finite adds nothing to its element."""

from __future__ import annotations

import torch
from torch import Tensor


def sifted(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(zeros where it is not finite, bool [] whether it is finite everywhere); grad itself if that is quickly said."""
    everywhere = torch.isfinite(grad.sum())
    # 0.2 ms instead of 8 for 2.6 M elements on a core of an EPYC; on a GPU somebody would wait for the answer. A sum of
    # finite values that overflows only takes the longer way.
    if grad.device.type == "cpu" and everywhere:
        return grad, everywhere
    each = torch.isfinite(grad)
    return torch.where(each, grad, 0.0), each.all()

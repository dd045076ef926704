"""Where SGD's momentum is: in the optimizer, or in what a method holds back. Not in both."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gradwire.compressors.topk import TopK
from gradwire.compressors.vgc import VGC


def own_momentum(method: Any) -> float:
    """That a method puts into what it holds back."""
    return method.momentum if isinstance(method, TopK | VGC) else 0.0


def warn_of_two(method: Any, optimizer: torch.optim.Optimizer) -> None:
    """Once, as Python shows a warning of the same words once."""
    own, theirs = own_momentum(method), max((group.get("momentum", 0) for group in optimizer.param_groups), default=0)
    if own and theirs:
        warnings.warn(
            f"gradwire: {type(method).__name__}(momentum={own:g}) has the momentum in what it holds back, and the "
            f"optimizer has one of {theirs:g} too: set the optimizer's to 0",
            stacklevel=2,
        )

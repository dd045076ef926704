"""Where SGD's momentum is: in the optimizer, or in what a method holds back. Not in both."""

from __future__ import annotations

import warnings

import torch

from gradwire.methods.base import Compressor
from gradwire.methods.topk.definition import TopK
from gradwire.methods.vgc import VGC


def tell(method: Compressor, optimizer: torch.optim.Optimizer) -> None:
    """Warns where SGD's momentum acts twice, or delays once more what is late already."""
    theirs = max((group.get("momentum", 0) for group in optimizer.param_groups), default=0)
    if not theirs or not isinstance(method, TopK | VGC):
        return
    name = type(method).__name__
    if method.momentum:
        said = (
            f"{name}(momentum={method.momentum:g}) has the momentum in what it holds back, and the optimizer has one "
            f"of {theirs:g} too: set the optimizer's to 0"
        )
    else:
        said = (
            f"the optimizer's momentum of {theirs:g} delays what {name} holds back once more. Try momentum=0 and "
            f"lr / (1 - {theirs:g}), as far in effect: docs/methods.md, Momentum, has what that gained"
        )
    warnings.warn(f"gradwire: {said}", stacklevel=3)

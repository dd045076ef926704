"""The arithmetic of steps 2 to 4 and 6, chosen by device. `reference` is the definition of right."""

from __future__ import annotations

from types import ModuleType

import torch

from gradwire.kernels import reference
from gradwire.kernels.reference import CHUNK, SMALLEST, Rule, Selection

__all__ = ["CHUNK", "SMALLEST", "Rule", "Selection", "select"]


def select(device: torch.device) -> ModuleType:
    """The kernels for `device`: a module with the functions of `reference`, same names, same results."""
    return reference

"""Where loops that Numba compiles take the place of plain torch: the same bits, one pass instead of many."""

from __future__ import annotations

import torch

from gradwire import kernels


def compiles(device: torch.device) -> bool:
    """On a CPU where Numba is installed; `kernels` says so once where it is not."""
    return device.type == "cpu" and kernels.select(device) is not kernels.reference

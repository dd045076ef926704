"""Where compiled loops take the place of plain torch: the same bits, one pass instead of many. Numba's or Triton's."""

from __future__ import annotations

import torch

from gradwire import codec as kernels


def compiles(device: torch.device) -> bool:
    """On a CPU where Numba is installed; `kernels` says so once where it is not."""
    return device.type == "cpu" and kernels.select(device) is not kernels.reference


def triton_ready(device: torch.device) -> bool:
    """On a CUDA device where Triton is installed; `kernels` says so once where it is not."""
    return device.type == "cuda" and kernels.select(device) is not kernels.reference

"""Step 1, moments: what a GPU is, for the choice of kernels. Imports no Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch

HALVES = (torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    """It comes with torch for CUDA on Linux; elsewhere the plain ways serve."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """(major capability, multiprocessors); a CPU, which only Triton's interpreter uses, counts as a small old chip."""
    if device.type != "cuda":
        return 8, 2
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count

"""Steps 2 to 4 and 6 of VGC, one call each way: accumulate, decide, pack, unpack; the bytes of every message."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import cast

import torch

from gradwire.codec import reference
from gradwire.codec.interface import CHUNK, PROBLEMS, SMALLEST, Codec, Inputs, Rule, Selection

__all__ = ["CHUNK", "PROBLEMS", "SMALLEST", "Codec", "Inputs", "Rule", "Selection", "numba_ready", "select"]
__all__ += ["triton_ready"]

# by device: the module, and the compiler it needs. Loaded when first asked for: a compiler takes a second to import.
DEVICES = {"cpu": ("gradwire.codec.cpu.codec", "numba"), "cuda": ("gradwire.codec.gpu.codec", "triton")}


@functools.cache
def select(device: torch.device) -> Codec:
    """The codec for `device`: a module with the functions of `reference`, same names, same results."""
    if device.type not in DEVICES:
        return reference
    name, compiler = DEVICES[device.type]
    try:
        importlib.import_module(compiler)
    except ImportError:
        # a new Python comes out months before its compilers do
        warnings.warn(
            f"gradwire: {compiler} is not installed, so the kernels for {device.type} are plain torch: the same "
            f"results, more than ten times slower. pip install {compiler}",
            stacklevel=3,
        )
        return reference
    return cast(Codec, importlib.import_module(name))


@functools.cache
def numba_ready(device: torch.device) -> bool:
    """Whether loops of machine code take the place of plain torch: on a CPU where Numba is installed."""
    return device.type == "cpu" and select(device) is not reference


@functools.cache
def triton_ready(device: torch.device) -> bool:
    """Whether Triton's kernels take the place of plain torch: on a CUDA device where Triton is installed."""
    return device.type == "cuda" and select(device) is not reference

"""The arithmetic of steps 2 to 4 and 6, chosen by device. `reference` is the definition of right."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import cast

import torch

from gradwire.codec import reference
from gradwire.codec.interface import CHUNK, PROBLEMS, SMALLEST, Kernels, Rule, Selection

__all__ = ["CHUNK", "PROBLEMS", "SMALLEST", "Kernels", "Rule", "Selection", "select"]

# by device: the module, and the compiler it needs. Loaded when first asked for: a compiler takes a second to import.
COMPILED = {"cpu": ("gradwire.codec.cpu.kernels", "numba"), "cuda": ("gradwire.codec.gpu.kernels", "triton")}


def select(device: torch.device) -> Kernels:
    """The kernels for `device`: a module with the functions of `reference`, same names, same results."""
    return _load(device.type)


@functools.cache
def _load(kind: str) -> Kernels:
    if kind not in COMPILED:
        return reference
    name, compiler = COMPILED[kind]
    try:
        importlib.import_module(compiler)
    except ImportError:
        # a new Python comes out months before its compilers do
        warnings.warn(
            f"gradwire: {compiler} is not installed, so the kernels for {kind} are plain torch: the same results, more "
            f"than ten times slower. pip install {compiler}",
            stacklevel=4,
        )
        return reference
    return cast(Kernels, importlib.import_module(name))

"""The random numbers of draws.py as machine code for the CPU."""

from __future__ import annotations

import numpy as np

from gradwire.compile.machine_code import machine_code


@machine_code
def mix(x: np.uint32) -> np.uint32:
    """As draws.py defines it. Numba widens what 32-bit numbers make to 64 bits: each result is cut again."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@machine_code
def draw(index: int, first: np.uint32, second: np.uint32) -> np.uint32:
    """One draw of the tensor with these words of its key; index: in the flat vector."""
    return mix(np.uint32(mix(np.uint32(np.uint32(index) + first)) + second))

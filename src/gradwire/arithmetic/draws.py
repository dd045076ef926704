"""Random numbers for rounding and choosing: each is a hash of (seed, step, rank, parameter name, index in the tensor).

Nothing is kept between steps, so a resumed run draws the same, and so do other buckets and other devices: the hash is
made of 32-bit integer operations alone. With (k0, k1) the two words of a tensor's key,

    draw(i) = mix(mix(i + k0) + k1)    modulo 2^32
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16    with logical shifts
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import triton_ready
from gradwire.layout import Layout, Slot

# odd numbers; a difference in one bit of x changes half of the others
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
UNIT = 2.0**-24


def key_of(seed: int, step: int, name: str, rank: int = 0) -> int:
    """64 bits. Give the rank where every rank rounds for itself, and none where all ranks must draw the same."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank} {name}".encode()).digest()[:8], "little")


def keys(seed: int, step: int, layout: Layout, rank: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [2, K]: k0 less the tensor's place in the bucket, to which a flat index is added; and k1."""
    words = np.array([key_of(seed, step, slot.name, rank) for slot in layout], "<u8").view("<u4").reshape(-1, 2)
    offsets = np.array([slot.offset % (1 << 32) for slot in layout], np.uint32)
    return np.stack([words[:, 0] - offsets, words[:, 1]]).view(np.int32)


def bits(seed: int, step: int, where: Layout | Slot, device: torch.device, rank: int = 0) -> Tensor:
    """int32 [N], every bit drawn."""
    layout = Layout.of([(where.name, where.shape)]) if isinstance(where, Slot) else where
    if triton_ready(device):
        from gradwire.arithmetic import draws_gpu

        return draws_gpu.bits(keys(seed, step, layout, rank), layout, device)
    return reference_bits(seed, step, layout, device, rank)


def reference_bits(seed: int, step: int, layout: Layout, device: torch.device, rank: int = 0) -> Tensor:
    """`bits` in plain torch, on any device: the definition."""
    first, second = torch.from_numpy(keys(seed, step, layout, rank)).to(device, non_blocking=True)
    x = torch.arange(layout.numel, dtype=torch.int32, device=device) + layout.spread(first)
    return mix(mix(x).add_(layout.spread(second)))


def mix(x: Tensor) -> Tensor:
    """In place. The shift of a signed number brings ones in from above, which the masks take away."""
    x ^= (x >> 16) & 0xFFFF
    x *= FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= SECOND
    x ^= (x >> 16) & 0xFFFF
    return x


def uniform(seed: int, step: int, where: Layout | Slot, device: torch.device, rank: int = 0) -> Tensor:
    """float32 [N] in [0, 1): the upper 24 bits of `bits`, so that all are equally likely and 1 is never reached."""
    return ((bits(seed, step, where, device, rank) >> 8) & 0xFFFFFF).float().mul_(UNIT)

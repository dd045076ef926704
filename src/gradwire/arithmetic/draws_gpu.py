"""The random numbers of draws.py for CUDA, and the groups of groups.py on a device, by which kernels are cut.

`fill_kernel` writes all draws of a bucket; `draw` is for kernels that need them on the way.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.arithmetic.groups import ScaleGroups, groups_of
from gradwire.compile.tiles import on_device
from gradwire.layout import Layout

FIRST, SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
UNIT = tl.constexpr(2.0**-24)
BLOCK = 1024  # draws of one program of `fill_kernel`


@triton.jit
def mix(x):
    """uint32, as draws.py defines it: the shifts of unsigned numbers are logical ones."""
    x ^= x >> 16
    x *= FIRST
    x ^= x >> 15
    x *= SECOND
    x ^= x >> 16
    return x


@triton.jit
def draw(index, first, second):
    """uint32: every bit drawn; index: in the flat vector; first, second: as `load_key` has them."""
    return mix(mix(index.to(tl.uint32) + first) + second)


@triton.jit
def chance(bits):
    """float32 in [0, 1): as draws.uniform."""
    return (bits >> 8).to(tl.float32) * UNIT


@triton.jit
def load_key(keys, slot, n_slots, mask):
    """Both words of the tensors' keys; keys int64 [2, K]."""
    first = tl.load(keys + slot, mask=mask, other=0).to(tl.uint32)
    return first, tl.load(keys + n_slots + slot, mask=mask, other=0).to(tl.uint32)


@triton.jit(do_not_specialize=["n_slots"])
def fill_kernel(table, keys, n_slots, out, width: tl.constexpr):
    """Program: a group of `width` elements. out int32 [N]: all draws."""
    group, lane = tl.program_id(0), tl.arange(0, width)
    at = tl.load(table.begin + group) + lane
    first, second = load_key(keys, tl.load(table.slot + group), n_slots, True)
    drawn = draw(at, first, second).to(tl.int32, bitcast=True)
    tl.store(out + at, drawn, mask=lane < tl.load(table.length + group))


class GroupTable(NamedTuple):
    """Groups on a device."""

    begin: Tensor  # int64 [G], in the flat vector
    length: Tensor  # int32 [G]
    slot: Tensor  # int32 [G], the tensor


@functools.lru_cache(maxsize=256)
def table_of(groups: ScaleGroups, device: torch.device) -> GroupTable:
    """Kept, because every step asks for it: 16 bytes a group."""
    begins = torch.from_numpy(groups.begins).to(device)
    return GroupTable(begins, groups.lengths(device).int(), torch.from_numpy(groups.slots).int().to(device))


def bits(keys: np.ndarray[Any, Any], layout: Layout, device: torch.device) -> Tensor:
    """As draws.reference_bits; keys: draws.keys."""
    groups, out = groups_of(layout, BLOCK), torch.empty(layout.numel, dtype=torch.int32, device=device)
    fill_kernel[(len(groups),)](table_of(groups, device), on_device(keys, device), len(layout), out, width=BLOCK)
    return out

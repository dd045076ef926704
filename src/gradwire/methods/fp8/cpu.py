"""FP8's rounding and adding as machine code for the CPU: the same codes and bits as torch's own conversions."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.groups import ScaleGroups
from gradwire.arithmetic.groups_cpu import MAGNITUDE, parts
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared

MANTISSA, SIGN, CODE = np.int32(0x007FFFFF), np.int32(0x80), np.uint8(0x7F)
TILE = 4096  # elements of a result that stay in the first cache while all ranks are added to them


def round_to(dtype: torch.dtype, grad: Tensor, scale: Tensor, codes: Tensor, tensors: ScaleGroups) -> None:
    """codes [N] = the nearest of the format to grad / scale, to the even one of two."""
    kind = torch.finfo(dtype)
    shift = np.int32(23 + math.log2(kind.eps))
    least = np.float32(kind.smallest_normal).view(np.int32)
    # below it the numbers are evenly spaced, as float32's are from `even` on: adding that rounds to them
    even = np.float32(kind.smallest_normal * kind.eps * 2.0**23)
    rule = (shift, least, even)
    shared(parts(tensors.numel), _round, grad.numpy(), scale.numpy(), *rule, tensors.ends, codes.numpy())


def largest_codes(codes: Tensor) -> Tensor:
    """The largest code of each rank without its sign, uint8 [W]. By torch a whole decode takes 1.12 times as long."""
    return torch.from_numpy(np.max(shared(parts(codes.shape[1]), _largest_codes, codes.numpy()), 0))


def add(dtype: torch.dtype, codes: Tensor, shares: Tensor, out: Tensor, tensors: ScaleGroups) -> None:
    """out += share * code of each rank, in rank order."""
    table = _numbers(dtype).numpy()
    shared(parts(tensors.numel), _add, codes.numpy(), shares.numpy(), table, tensors.ends, out.numpy())


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """What each of the 256 codes means."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@machine_code
def _round(
    begin: int,
    end: int,
    grad: Array,
    scales: Array,
    shift: np.int32,
    least: np.int32,
    even: np.float32,
    ends: Array,
    codes: Array,
) -> None:
    group, at = np.searchsorted(ends, begin, side="right"), begin
    scaled, spaced = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    while at < end:
        while ends[group] <= at:
            group += 1
        stop = min(end, ends[group], at + TILE)
        _divide(grad[at:stop], scales[group], even, scaled, spaced)
        _encode(scaled.view(np.int32), spaced.view(np.int32), shift, least, codes[at:stop])
        at = stop


@machine_code
def _divide(grad: Array, scale: np.float32, even: np.float32, scaled: Array, spaced: Array) -> None:
    for i in range(grad.size):
        scaled[i] = grad[i] / scale
        spaced[i] = abs(scaled[i]) + even


@machine_code
def _encode(scaled: Array, spaced: Array, shift: np.int32, least: np.int32, codes: Array) -> None:
    """From the bits of both; `even` is a power of two, so the mantissa of `spaced` is the code of a small one."""
    one = np.int32(1)
    half = (one << (shift - one)) - one
    rebias = (least >> shift) - (one << (np.int32(23) - shift))
    for i in range(codes.size):
        size = scaled[i] & MAGNITUDE
        normal = ((size + half + ((size >> shift) & one)) >> shift) - rebias
        code = normal if size >= least else spaced[i] & MANTISSA
        codes[i] = np.uint8(code | ((scaled[i] >> np.int32(24)) & SIGN))


@machine_code
def _largest_codes(begin: int, end: int, codes: Array) -> Array:
    tops = np.zeros(codes.shape[0], np.uint8)
    for rank in range(codes.shape[0]):
        tops[rank] = _top(codes[rank, begin:end])
    return tops


@machine_code
def _top(codes: Array) -> np.uint8:
    top = np.uint8(0)
    for i in range(codes.size):
        top = max(top, codes[i] & CODE)
    return top


@machine_code
def _add(begin: int, end: int, codes: Array, shares: Array, table: Array, ends: Array, out: Array) -> None:
    """Tile by tile, all ranks: the result goes through the cache once."""
    for first in range(begin, end, TILE):
        last = min(end, first + TILE)
        for rank in range(codes.shape[0]):
            group, at = np.searchsorted(ends, first, side="right"), first
            while at < last:
                while ends[group] <= at:
                    group += 1
                stop = min(last, ends[group])
                _add_group(codes[rank, at:stop], shares[rank, group], table, out[at:stop])
                at = stop


@machine_code
def _add_group(codes: Array, share: np.float32, table: Array, out: Array) -> None:
    for i in range(codes.size):
        out[i] += table[codes[i]] * share

"""TernGrad on a CPU: draw, round and pack in one pass, unpack and add in another; the bits of definition.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.groups import ScaleGroups
from gradwire.arithmetic.groups_cpu import fold, parts_of_groups, parts_of_words
from gradwire.arithmetic.levels_cpu import add_tile, round_tile
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared
from gradwire.methods.terngrad.trits import EACH, PLACES

TILE = 2048  # bytes whose elements stay in the first-level cache between rounding and packing
BITS = 2  # of a code: the sign and one level, so 0, 1 for plus and 3 for minus
# the codes that a byte holds, [256, 5]
CODES = np.array([0, 1, 3], np.uint8)[np.arange(256)[:, None] // np.array(PLACES) % 3]


def moments(grad: Tensor, firsts: Tensor, blocks: ScaleGroups) -> Tensor:
    """float64 [2, blocks]: the sums of d and d^2, with d = g less the first element of its tensor."""
    sums = torch.empty(2, len(blocks), dtype=torch.float64)
    shifts = firsts.numpy()[blocks.slots]
    inputs = (grad.numpy(), blocks.begins, blocks.ends, shifts, blocks.size, sums.numpy())
    shared(parts_of_groups(len(blocks), blocks.numel), _moments, *inputs)
    return sums


@machine_code
def _moments(
    first: int, last: int, grad: Array, begins: Array, ends: Array, shifts: Array, size: int, sums: Array
) -> None:
    apart, squares = np.empty(size, np.float64), np.empty(size, np.float64)
    for block in range(first, last):
        part, shift = grad[begins[block] : ends[block]], np.float64(shifts[block])
        for i in range(part.size):
            apart[i] = np.float64(part[i]) - shift
            squares[i] = apart[i] * apart[i]
        sums[0, block] = fold(apart, part.size)
        sums[1, block] = fold(squares, part.size)


def write(grad: Tensor, scales: Tensor, keys: Array, tensors: ScaleGroups, packed: Tensor) -> Tensor:
    """packed = the trits; |sent|_1."""
    inputs = (grad.numpy(), scales.numpy(), tensors.ends, tensors.slots, keys, packed.numpy())
    return torch.tensor(sum(shared(parts_of_words(len(packed), EACH), _encode, *inputs)), dtype=torch.float32)


@machine_code
def _encode(
    begin: int, end: int, grad: Array, scales: Array, ends: Array, slots: Array, keys: Array, packed: Array
) -> float:
    """packed[begin:end], bytes of the elements in them; returns |sent|_1."""
    codes, sent = np.empty(TILE * EACH, np.uint8), 0.0
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * EACH, min(tile_end * EACH, grad.size)
        sent = round_tile(origin, stop, grad, scales, ends, slots, keys, BITS, codes, sent)
        codes[max(stop - origin, 0) : (tile_end - tile) * EACH] = 0
        for i in range((tile_end - tile) * EACH):
            codes[i] -= codes[i] >> np.uint8(1)  # 3 becomes 2
        for i in range(tile_end - tile):
            five = codes[i * EACH : i * EACH + EACH]
            packed[tile + i] = five[0] + 3 * five[1] + 9 * five[2] + 27 * five[3] + 81 * five[4]
    return sent


def add(packed: Tensor, units: Tensor, tensors: ScaleGroups, out: Tensor) -> None:
    """out += all ranks' bytes [W, n]; units [W, K]: s, times the weight."""
    inputs = (packed.numpy(), units.numpy(), tensors.ends, CODES, out.numpy())
    shared(parts_of_words(packed.shape[1], EACH), _decode, *inputs)


@machine_code
def _decode(begin: int, end: int, packed: Array, units: Array, ends: Array, table: Array, out: Array) -> None:
    """out += all ranks' packed[:, begin:end], tile by tile, in rank order."""
    codes = np.empty(TILE * EACH, np.uint8)
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * EACH, min(tile_end * EACH, out.size)
        for rank in range(packed.shape[0]):
            for i in range(tile_end - tile):
                for place in range(EACH):
                    codes[i * EACH + place] = table[packed[rank, tile + i], place]
            add_tile(origin, stop, codes, units[rank], ends, 1, out)

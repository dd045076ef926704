"""QSGD on a CPU: draw, round and pack in one pass, unpack and add in another; the bits of definition.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic import groups_cpu
from gradwire.arithmetic.finite import LARGEST
from gradwire.arithmetic.groups import ScaleGroups
from gradwire.arithmetic.levels_cpu import add_tile, round_tile
from gradwire.codec import fields
from gradwire.codec.cpu import fields as fields_cpu
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared

TILE = 512  # words whose elements stay in the first-level cache between rounding and packing


def write(grad: Tensor, groups: ScaleGroups, keys: Array, bits: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The body, and |sent|_1."""
    n_words = fields.n_words(len(grad), bits)
    body = torch.empty(len(groups) + n_words, dtype=torch.int32)
    norms, words = body[: len(groups)].view(torch.float32), body[len(groups) :].numpy()
    if largest:
        norms.copy_(groups.largest(grad))
    else:
        where = (groups.begins, groups.ends)
        shared(groups_cpu.parts_of_groups(len(groups), len(grad)), _norms, grad.numpy(), *where, norms.numpy())
    inputs = (grad.numpy(), norms.numpy(), groups.ends, groups.slots, keys, bits, words)
    sent = sum(shared(groups_cpu.parts_of_words(n_words, 32 // bits), _encode, *inputs))
    return body, torch.tensor(sent / ((1 << (bits - 1)) - 1), dtype=torch.float32)


@machine_code
def _norms(first: int, last: int, flat: Array, begins: Array, ends: Array, out: Array) -> None:
    """The 2-norm of each group, in double precision and then rounded; not above the largest float32."""
    squares = np.empty(max(np.max(ends[first:last] - begins[first:last]), 1) if last > first else 1, np.float64)
    for group in range(first, last):
        part = flat[begins[group] : ends[group]]
        for i in range(part.size):
            value = np.float64(part[i])
            squares[i] = value * value
        out[group] = np.float32(min(np.sqrt(groups_cpu.fold(squares, part.size)), np.float64(LARGEST)))


@machine_code
def _encode(
    begin: int, end: int, grad: Array, norms: Array, ends: Array, slots: Array, keys: Array, bits: int, words: Array
) -> float:
    """words[begin:end] of the elements in them; returns the sum of norm * level."""
    each, sent = 32 // bits, 0.0
    codes = np.empty(TILE * each, np.uint8)
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * each, min(tile_end * each, grad.size)
        sent = round_tile(origin, stop, grad, norms, ends, slots, keys, bits, codes, sent)
        fields_cpu.pack(0, tile_end - tile, codes[: stop - origin], bits, words[tile:tile_end])
    return sent


def add(words: Tensor, units: Tensor, groups: ScaleGroups, bits: int, out: Tensor) -> None:
    """out += all ranks' words [W, n_words]; units [W, G]: norm / s, times the weight."""
    inputs = (words.numpy(), units.numpy(), groups.ends, bits, out.numpy())
    shared(groups_cpu.parts_of_words(words.shape[1], 32 // bits), _decode, *inputs)


@machine_code
def _decode(begin: int, end: int, words: Array, units: Array, ends: Array, bits: int, out: Array) -> None:
    """out += all ranks' words[:, begin:end], tile by tile, in rank order."""
    each, levels = 32 // bits, (1 << (bits - 1)) - 1
    codes = np.empty(TILE * each, np.uint8)
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * each, min(tile_end * each, out.size)
        for rank in range(words.shape[0]):
            fields_cpu.unpack(0, tile_end - tile, words[rank, tile:tile_end], bits, codes[: stop - origin])
            add_tile(origin, stop, codes, units[rank], ends, levels, out)

"""QSGD on a CPU: draw, round and pack in one pass, unpack and add in another; the bits of qsgd.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic import groups_cpu as compiled_groups
from gradwire.arithmetic.draws_cpu import draw
from gradwire.arithmetic.groups import Groups
from gradwire.codec import fields
from gradwire.codec.cpu import fields as compiled_fields
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import equal_parts, shared

TILE = 512  # words whose elements stay in the first-level cache between rounding and packing
UNIT = np.float32(2.0**-24)
ZERO = np.float32(0)


@machine_code
def round_run(
    begin: int, end: int, grad: Array, norm: np.float32, first: np.uint32, second: np.uint32, bits: int, codes: Array
) -> int:
    """Codes of grad[begin:end], of one group; returns the sum of the levels."""
    sign, levels, total = np.int32(bits - 1), np.float32((1 << (bits - 1)) - 1), 0
    if norm == ZERO:
        codes[: end - begin] = 0
        return total
    part, places = grad[begin:end], codes[: end - begin]
    for i in range(part.size):
        size = min(abs(part[i]) / norm * levels, levels)
        whole = np.int32(size)
        chance = np.float32(np.int32(draw(begin + i, first, second) >> np.uint32(8))) * UNIT
        level = whole + np.int32(chance < size - np.float32(whole))
        total += int(level)
        places[i] = level | np.int32((part[i] < ZERO) & (level > 0)) << sign
    return total


@machine_code
def encode(
    begin: int,
    end: int,
    grad: Array,
    norms: Array,
    ends: Array,
    slots: Array,
    keys: Array,
    bits: int,
    words: Array,
) -> float:
    """words[begin:end] of the elements in them; returns the sum of norm * level."""
    each, sent, key_words = 32 // bits, 0.0, keys.view(np.uint32)
    codes = np.empty(TILE * each, np.uint8)
    group = np.searchsorted(ends, begin * each, side="right")
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * each, min(tile_end * each, grad.size)
        at = origin
        while at < stop:
            while ends[group] <= at:
                group += 1
            run_end, norm, slot = min(ends[group], stop), norms[group], slots[group]
            key = (key_words[0, slot], key_words[1, slot])
            sent += round_run(at, run_end, grad, norm, *key, bits, codes[at - origin :]) * np.float64(norm)
            at = run_end
        compiled_fields.pack(0, tile_end - tile, codes[: stop - origin], bits, words[tile:tile_end])
    return sent


@machine_code
def add_run(codes: Array, unit: np.float32, levels: int, out: Array) -> None:
    """out += what the codes of one group say; unit: norm / s, times the weight."""
    below = np.uint8(levels)
    for i in range(out.size):
        value = np.float32(codes[i] & below) * unit
        out[i] += -value if codes[i] > below else value


@machine_code
def decode(begin: int, end: int, words: Array, units: Array, ends: Array, bits: int, out: Array) -> None:
    """out += all ranks' words[:, begin:end], tile by tile, in rank order; units: [W, G]."""
    each, levels = 32 // bits, (1 << (bits - 1)) - 1
    codes = np.empty(TILE * each, np.uint8)
    first = np.searchsorted(ends, begin * each, side="right")
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop, group = tile * each, min(tile_end * each, out.size), first
        for rank in range(words.shape[0]):
            compiled_fields.unpack(0, tile_end - tile, words[rank, tile:tile_end], bits, codes[: stop - origin])
            at, group = origin, first
            while at < stop:
                while ends[group] <= at:
                    group += 1
                run_end = min(ends[group], stop)
                add_run(codes[at - origin : run_end - origin], units[rank, group], levels, out[at:run_end])
                at = run_end
        first = group


def write(grad: Tensor, groups: Groups, keys: Array, bits: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The body, and |sent|_1."""
    n_threads, n_words = torch.get_num_threads(), fields.n_words(len(grad), bits)
    body = torch.empty(len(groups) + n_words, dtype=torch.int32)
    norms, words = body[: len(groups)].view(torch.float32).numpy(), body[len(groups) :].numpy()
    measure = compiled_groups.largest if largest else compiled_groups.norms
    shared(groups.parts(n_threads), measure, grad.numpy(), groups.begins, groups.ends, norms)
    inputs = (grad.numpy(), norms, groups.ends, groups.slots, keys, bits, words)
    sent = sum(shared(_parts(n_words, bits), encode, *inputs))
    return body, torch.tensor(sent / ((1 << (bits - 1)) - 1), dtype=torch.float32)


def add(words: Tensor, units: Tensor, groups: Groups, bits: int, out: Tensor) -> None:
    """out += all ranks' words [W, n_words]; units [W, G]: norm / s, times the weight."""
    inputs = (words.numpy(), units.numpy(), groups.ends, bits, out.numpy())
    shared(_parts(words.shape[1], bits), decode, *inputs)


def _parts(n_words: int, bits: int) -> list[tuple[int, int]]:
    """Words (begin, end) for each thread that is worth it."""
    each = 32 // bits
    return [(begin // each, end // each) for begin, end in equal_parts(n_words * each, torch.get_num_threads())]

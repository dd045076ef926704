"""TernGrad on a CPU: draw, round and pack in one pass, unpack and add in another; the bits of terngrad.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic import groups_cpu as compiled_groups
from gradwire.arithmetic.draws_cpu import draw
from gradwire.arithmetic.groups import BLOCK, groups_of, largest, sums
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import equal_parts, shared
from gradwire.layout import Layout
from gradwire.methods.terngrad.definition import EACH, PLACES, clipped, deviation

TILE = 2048  # bytes whose elements stay in the first-level cache between rounding and packing
UNIT = np.float32(2.0**-24)
ZERO = np.float32(0)
# what a byte says, [256, 5]: 0, 1 or -1
TRITS = ((np.arange(256)[:, None] // np.array(PLACES) + 1) % 3 - 1).astype(np.int8)


@machine_code
def measure(first: int, last: int, grad: Array, begins: Array, ends: Array, shifts: Array, results: Array) -> None:
    """results[:, block] = sums of d and d^2, with d = g less the block's shift."""
    apart, squares = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    for block in range(first, last):
        part, shift = grad[begins[block] : ends[block]], np.float64(shifts[block])
        for i in range(part.size):
            apart[i] = np.float64(part[i]) - shift
            squares[i] = apart[i] * apart[i]
        results[0, block] = compiled_groups.fold(apart, part.size)
        results[1, block] = compiled_groups.fold(squares, part.size)


@machine_code
def round_run(
    begin: int, end: int, grad: Array, scale: np.float32, first: np.uint32, second: np.uint32, trits: Array
) -> int:
    """Trits of grad[begin:end], of one tensor; returns how many are sent."""
    part, places, n_sent = grad[begin:end], trits[: end - begin], 0
    if scale == ZERO:
        places[:] = 0
        return n_sent
    for i in range(part.size):
        chance = np.float32(np.int32(draw(begin + i, first, second) >> np.uint32(8))) * UNIT
        sent = np.int32(chance < min(abs(part[i]), scale) / scale)
        n_sent += int(sent)
        places[i] = sent << np.int32(part[i] < ZERO)
    return n_sent


@machine_code
def encode(begin: int, end: int, grad: Array, scales: Array, ends: Array, keys: Array, packed: Array) -> float:
    """packed[begin:end], bytes of the elements in them; returns |sent|_1."""
    trits, sent_norm, key_words = np.empty(TILE * EACH, np.uint8), 0.0, keys.view(np.uint32)
    slot = np.searchsorted(ends, begin * EACH, side="right")
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop = tile * EACH, min(tile_end * EACH, grad.size)
        at = origin
        while at < stop:
            while ends[slot] <= at:
                slot += 1
            run_end, scale = min(ends[slot], stop), scales[slot]
            key = (key_words[0, slot], key_words[1, slot])
            sent_norm += round_run(at, run_end, grad, scale, *key, trits[at - origin :]) * np.float64(scale)
            at = run_end
        trits[max(stop - origin, 0) : (tile_end - tile) * EACH] = 0
        for i in range(tile_end - tile):
            five = trits[i * EACH : i * EACH + EACH]
            packed[tile + i] = five[0] + 3 * five[1] + 9 * five[2] + 27 * five[3] + 81 * five[4]
    return sent_norm


@machine_code
def add_run(trits: Array, unit: np.float32, out: Array) -> None:
    """out += what the trits of one tensor say."""
    for i in range(out.size):
        out[i] += np.float32(trits[i]) * unit


@machine_code
def decode(begin: int, end: int, packed: Array, units: Array, ends: Array, table: Array, out: Array) -> None:
    """out += all ranks' packed[:, begin:end], tile by tile, in rank order; units: [W, K]."""
    trits = np.empty(TILE * EACH, np.int8)
    first = np.searchsorted(ends, begin * EACH, side="right")
    for tile in range(begin, end, TILE):
        tile_end = min(tile + TILE, end)
        origin, stop, slot = tile * EACH, min(tile_end * EACH, out.size), first
        for rank in range(packed.shape[0]):
            for i in range(tile_end - tile):
                for place in range(EACH):
                    trits[i * EACH + place] = table[packed[rank, tile + i], place]
            at, slot = origin, first
            while at < stop:
                while ends[slot] <= at:
                    slot += 1
                run_end = min(ends[slot], stop)
                add_run(trits[at - origin : run_end - origin], units[rank, slot], out[at:run_end])
                at = run_end
        first = slot


def scales(grad: Tensor, layout: Layout, clip: float | None) -> Tensor:
    """s, float32 [K]."""
    blocks, n_threads = groups_of(layout, BLOCK), torch.get_num_threads()
    where, parts = (grad.numpy(), blocks.begins, blocks.ends), blocks.parts(n_threads)
    tops = torch.empty(len(blocks))
    shared(parts, compiled_groups.largest, *where, tops.numpy())
    top = largest(tops, groups_of(blocks.above, None))
    if clip is None or not layout.numel:
        return top
    first = grad.numpy()[np.minimum(groups_of(layout, None).begins, layout.numel - 1)]
    results = torch.empty(2, len(blocks), dtype=torch.float64)
    shared(parts, measure, *where, first[blocks.slots], results.numpy())
    total, squares = (sums(result, blocks.above) for result in results)
    return clipped(top, deviation(total, squares, layout.lengths(grad.device)), clip)


def write(grad: Tensor, layout: Layout, keys: Array, clip: float | None, n_words: int) -> tuple[Tensor, Tensor]:
    """The body, and |sent|_1."""
    body = torch.empty(len(layout) + n_words, dtype=torch.int32)
    body[: len(layout)] = scales(grad, layout, clip).view(torch.int32)
    lengths, packed = body[: len(layout)].view(torch.float32).numpy(), body[len(layout) :].view(torch.uint8).numpy()
    inputs = (grad.numpy(), lengths, groups_of(layout, None).ends, keys, packed)
    return body, torch.tensor(sum(shared(_parts(len(packed)), encode, *inputs)), dtype=torch.float32)


def add(packed: Tensor, units: Tensor, layout: Layout, out: Tensor) -> None:
    """out += all ranks' bytes [W, n]; units [W, K]: s, times the weight."""
    inputs = (packed.numpy(), units.numpy(), groups_of(layout, None).ends, TRITS, out.numpy())
    shared(_parts(packed.shape[1]), decode, *inputs)


def _parts(n_bytes: int) -> list[tuple[int, int]]:
    """Bytes (begin, end) for each thread that is worth it."""
    return [(begin // EACH, end // EACH) for begin, end in equal_parts(n_bytes * EACH, torch.get_num_threads())]

"""AdaComp's selection as machine code for the CPU: one pass over the bucket, bin by bin; the bits of plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import SMALL, shared

LARGEST = np.float32(3.4028234663852886e38)
MAGNITUDE = np.int32(0x7FFFFFFF)
TILE = 16  # elements whose largest is found in one go; mostly none of them passes
ZERO = np.float32(0)


def select(residual: Tensor, grad: Tensor, live: Tensor | None, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r += g; the places of those that pass, int64 [n], max |G| by bin, float32 [B], and whether all was finite.

    begins: of the bins, int64 [B + 1]; live: bool [B], those in tensors with a gradient, None: all.
    """
    n_bins, numel = len(begins) - 1, len(residual)
    n_parts = max(1, min(torch.get_num_threads(), numel // SMALL))
    cuts = [n_bins * part // n_parts for part in range(n_parts + 1)]
    parts = [(part, cuts[part], cuts[part + 1]) for part in range(n_parts)]
    alive = np.ones(n_bins, np.bool_) if live is None else live.numpy()
    places, largest, found = np.empty(numel, np.int32), np.zeros(n_bins, np.float32), np.zeros((n_parts, 2), np.int64)
    edges = begins.numpy()
    shared(parts, _select, edges, alive, residual.numpy(), grad.numpy(), places, largest, found)
    runs = [places[edges[first] : edges[first] + found[part, 0]] for part, first, _ in parts]
    chosen = np.concatenate(runs, dtype=np.int64)
    return torch.from_numpy(chosen), torch.from_numpy(largest), torch.tensor(not found[:, 1].any())


@machine_code
def _select(
    part: int,
    first: int,
    last: int,
    begins: Array,
    live: Array,
    residual: Array,
    grad: Array,
    places: Array,
    largest: Array,
    found: Array,
) -> None:
    """The bins first .. last - 1; places from the part's own begin on; found[part]: how many, whether any was bad."""
    longest = 0
    for one in range(first, last):
        longest = max(longest, begins[one + 1] - begins[one])
    reach, tops = np.empty(longest, np.float32), np.empty(1, np.int32)
    out, bad = begins[first], np.int32(0)
    for one in range(first, last):
        if not live[one]:
            continue
        begin, end = begins[one], begins[one + 1]
        r, h = residual[begin:end], reach[: end - begin]
        bad |= _accumulate(r, grad[begin:end], h)
        tops[0] = _top(r.view(np.int32))
        largest[one] = tops.view(np.float32)[0]
        out = _collect(r, h.view(np.int32), tops[0], begin, places, out)
    found[part, 0], found[part, 1] = out - begins[first], bad


@machine_code
def _accumulate(r: Array, g: Array, h: Array) -> np.int32:
    """r = G, h = H; a bad value adds nothing. Not 0 if there was one."""
    bad = np.int32(0)
    for i in range(r.size):
        total = r[i] + g[i]
        good = abs(total) <= LARGEST
        total = total if good else r[i]
        h[i] = total + (g[i] if good else ZERO)
        r[i] = total
        bad |= np.int32(not good)
    return bad


@machine_code
def _top(bits: Array) -> np.int32:
    """The bits of the largest size: integers, so that the loop is vectorized."""
    top = np.int32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top


@machine_code
def _collect(r: Array, reach: Array, top: np.int32, begin: int, places: Array, out: int) -> int:
    """Writes down who passes, from `out` on; where it stopped."""
    whole = r.size // TILE * TILE
    for tile in range(0, r.size, TILE):
        if tile < whole:
            most = np.int32(0)
            for i in range(TILE):
                most = max(most, reach[tile + i] & MAGNITUDE)
            if most < top:
                continue
        for i in range(tile, min(tile + TILE, r.size)):
            if (reach[i] & MAGNITUDE) >= top and r[i] != ZERO:
                places[out] = begin + i
                out += 1
    return out

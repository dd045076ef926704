"""AdaComp's selection as machine code for the CPU: one pass over the bucket, bin by bin; the bits of plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.finite import LARGEST
from gradwire.arithmetic.groups import ScaleGroups
from gradwire.arithmetic.groups_cpu import collect, largest_bits, parts_of_groups
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import shared

MOST = np.float32(LARGEST)
ZERO = np.float32(0)


def select(residual: Tensor, grad: Tensor, live: Tensor | None, bins: ScaleGroups) -> tuple[Tensor, Tensor, Tensor]:
    """r += g; the places of those that pass, int64 [n], max |G| by bin, float32 [B], and whether all was finite.

    live: bool [B], those in tensors with a gradient, None: all.
    """
    parts = [(part, first, last) for part, (first, last) in enumerate(parts_of_groups(len(bins), bins.numel))]
    alive = np.ones(len(bins), np.bool_) if live is None else live.numpy()
    places, tops = np.empty(bins.numel, np.int32), np.zeros(len(bins), np.int32)
    found = np.zeros((len(parts), 2), np.int64)
    shared(parts, _select, bins.begins, bins.ends, alive, residual.numpy(), grad.numpy(), places, tops, found)
    lists = [places[bins.begins[first] :][: found[part, 0]] for part, first, last in parts if first < last]
    chosen = np.concatenate([np.empty(0, np.int64), *lists], dtype=np.int64)
    return torch.from_numpy(chosen), torch.from_numpy(tops).view(torch.float32), torch.tensor(not found[:, 1].any())


@machine_code
def _select(
    part: int,
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    residual: Array,
    grad: Array,
    places: Array,
    tops: Array,
    found: Array,
) -> None:
    """The bins first .. last - 1; places from the part's own begin on; found[part]: how many, whether any was bad."""
    if first == last:
        return
    longest = 0
    for one in range(first, last):
        longest = max(longest, ends[one] - begins[one])
    reach, out, bad = np.empty(longest, np.float32), begins[first], np.int32(0)
    for one in range(first, last):
        if not live[one]:
            continue
        r, h = residual[begins[one] : ends[one]], reach[: ends[one] - begins[one]]
        bad |= _accumulate(r, grad[begins[one] : ends[one]], h)
        tops[one] = largest_bits(r)
        out = collect(h.view(np.int32), r, tops[one], begins[one], places, out)
    found[part, 0], found[part, 1] = out - begins[first], bad


@machine_code
def _accumulate(r: Array, g: Array, h: Array) -> np.int32:
    """r = G, h = H; a bad value adds nothing. Not 0 if there was one."""
    bad = np.int32(0)
    for i in range(r.size):
        total = r[i] + g[i]
        good = abs(total) <= MOST
        total = total if good else r[i]
        h[i] = total + (g[i] if good else ZERO)
        r[i] = total
        bad |= np.int32(not good)
    return bad

"""The largest elements of each tensor without a sort of all: a sample gives a threshold, few elements pass it.

For k of n elements, 32 n / k of them are looked at, chosen by step and name. The 49th largest of these is the floor:
32 of them are expected among the k largest, and 17 more are three standard deviations. Of what is not below the floor
the k largest are taken, ties by place. So these are the k largest of the tensor, unless fewer than k pass, in about
one case of 300: then the others stay where they are, or, if it is to be exact, the floor falls. Zeros never pass.

Sizes are compared as the bits of |x|, integers in the same order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradwire.arithmetic.draws import key_of
from gradwire.arithmetic.shuffle import progression
from gradwire.codec.quota import Quota, table_of
from gradwire.layout import Slot

EXPECTED, RANK = 32, 49  # elements of the sample above the true threshold, and the one that gives the floor
FEWEST = 128  # k below which a sample is not worth it: it would be more than a quarter of the tensor
MAGNITUDE = 0x7FFFFFFF  # also a floor that nothing passes


def largest(flat: Tensor, quota: Quota, step: int, exact: bool, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flat places, int64 [E], and their values, of the largest |flat| of each tensor, in order of their places.

    Where fewer than k are found the rest is the tensor's last place with the value 0, also for tensors not `active`.
    Plain torch, on any device: the definition. Nothing is waited for.
    """
    layout, table, sizes = quota.layout, table_of(quota, flat.device), flat.view(torch.int32) & MAGNITUDE
    least = []
    for slot, k in zip(layout, quota.counts, strict=True):
        own = slot.of(sizes)
        floor = own.new_ones(()) if exact or not sampled(k, slot.numel) else _floor(own, slot, k, step)
        least.append(floor if k == 0 else torch.maximum(floor, own.topk(k).values[-1]))
    bound = torch.stack(least)
    if active is not None:
        bound.masked_fill_(~active, MAGNITUDE)
    each, tensor = layout.spread(bound), layout.spread(torch.arange(len(layout), device=flat.device))
    above, equal = sizes > each, sizes == each
    room = table.counts - _within(above, quota)[1]
    chosen = above | (equal & (_within(equal, quota)[0] <= layout.spread(room)))
    entry = torch.where(chosen, layout.spread(table.firsts) + _within(chosen, quota)[0] - 1, quota.total)
    places = torch.cat([(table.offsets + table.numels - 1)[quota.tensor(flat.device)], tensor.new_zeros(1)])
    values = flat.new_zeros(quota.total + 1)
    places.scatter_(0, entry, torch.arange(layout.numel, device=flat.device))
    values.scatter_(0, entry, flat)
    return places[:-1], values[:-1]


def _within(mask: Tensor, quota: Quota) -> tuple[Tensor, Tensor]:
    """How many are true in a tensor up to each element, [N], and in all of the tensor, [K]."""
    table, layout = table_of(quota, mask.device), quota.layout
    running = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    before = running[table.offsets]
    return running[1:] - layout.spread(before), running[table.offsets + table.numels] - before


def sampled(k: int, numel: int) -> bool:
    """Whether the floor of a tensor comes from a sample."""
    return k >= FEWEST and 2 * k <= numel


@functools.lru_cache(maxsize=4096)  # several workers in one process ask for the same
def line_of(step: int, slot: Slot) -> tuple[int, int]:
    """(factor, start): the i-th of a tensor's sample is at (factor i + start) mod n."""
    return progression(key_of(0, step, slot.name), slot.numel)


def _floor(sizes: Tensor, slot: Slot, k: int, step: int) -> Tensor:
    """The floor of one tensor, int32 [], at least 1."""
    factor, start = line_of(step, slot)
    numbers = torch.arange(EXPECTED * slot.numel // k, device=sizes.device)
    return sizes[(factor * numbers + start) % slot.numel].topk(RANK).values[-1].clamp(min=1)

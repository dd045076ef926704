"""Some places of each tensor, chosen by a key and none twice, without sorting: the same on every rank and device.

The first places of a permutation of 0 .. n - 1, made of
    x = (a i + b) mod n, with a prime to n, for i = 0, 1, ..
and, to break up its pattern, of rounds of swap-or-not (Hoang, Morris, Rogaway, CRYPTO 2012): x and its partner
(p - x) mod n change places where a coin that both of them toss, a hash of the larger, says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.arithmetic.draws import key_of, mix
from gradwire.codec.quota import Quota, table_of

ROUNDS = 8


def progression(key: int, numel: int) -> tuple[int, int]:
    """(a, b) of a tensor from a key of 64 bits."""
    rest, start = divmod(key, numel)
    factor = rest % numel or 1
    while math.gcd(factor, numel) != 1:
        factor += 1
    return factor % numel, start


def chosen(seed: int, step: int, quota: Quota, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat places, int64 [E], and which tensor each belongs to, int64 [E]."""
    slots = [slot if slot.numel else None for slot in quota.layout]
    keys = [0 if slot is None else key_of(seed, step, slot.name) for slot in slots]
    lines = [(0, 0) if slot is None else progression(key, slot.numel) for slot, key in zip(slots, keys, strict=True)]
    factor, start = torch.tensor(lines, dtype=torch.int64).to(device, non_blocking=True).unbind(1)
    table, tensor = table_of(quota, device), quota.tensor(device)
    numel = table.numels[tensor]
    x = (factor[tensor] * quota.number(tensor) + start[tensor]) % numel
    for words, salts in _round_keys(keys, device):
        pivots = (words.long() & 0xFFFFFFFF) * table.numels >> 32
        partner = pivots[tensor] - x
        partner = torch.where(partner < 0, partner + numel, partner)
        coin = mix(torch.maximum(x, partner).int() + salts[tensor]) & 1
        x = torch.where(coin != 0, partner, x)
    return x + table.offsets[tensor], tensor


def _round_keys(keys: list[int], device: torch.device) -> Tensor:
    """Two words for each round and tensor, int32 [ROUNDS, 2, K]."""
    halves = torch.tensor([[key & 0xFFFFFFFF, key >> 32] for key in keys], dtype=torch.int64)
    first, second = halves.view(torch.int32)[:, ::2].unbind(1)
    numbers = torch.arange(2 * ROUNDS, dtype=torch.int32)[:, None]
    return mix(mix(numbers + first) + second).view(ROUNDS, 2, -1).to(device, non_blocking=True)

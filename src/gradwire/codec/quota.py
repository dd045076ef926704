"""How many elements of each tensor a sparse method sends: E entries, tensor by tensor, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.layout import Layout


class QuotaTable(NamedTuple):
    """By tensor, int64 [K]."""

    counts: Tensor
    firsts: Tensor  # the first entry
    offsets: Tensor  # the first flat place
    numels: Tensor


@dataclass(frozen=True, eq=False)
class Quota:
    """k = max(1, floor(density n)) entries for a tensor of n elements."""

    layout: Layout
    counts: tuple[int, ...]  # [K]

    @classmethod
    @lru_cache(maxsize=256)  # buckets, in some steps
    def of(cls, layout: Layout, density: float) -> Quota:
        """Kept for the last few: both sides of an exchange ask for the same."""
        share = Fraction(str(density))  # as it is written: 0.07 of 100 elements are 7, though 0.07 * 100 > 7
        return cls(layout, tuple(min(slot.numel, max(1, math.floor(share * slot.numel))) for slot in layout))

    @cached_property
    def total(self) -> int:
        """E."""
        return sum(self.counts)

    def tensor(self, device: torch.device) -> Tensor:
        """Which tensor each entry belongs to, int64 [E]."""
        return torch.repeat_interleave(table_of(self, device).counts, output_size=self.total)

    def number(self, tensor: Tensor) -> Tensor:
        """0 .. k - 1 in each tensor, int64 [E]; tensor: as `tensor` gives it."""
        return torch.arange(self.total, device=tensor.device) - table_of(self, tensor.device).firsts[tensor]


def check_density(method: str, density: float) -> None:
    """Refuses what is no share of a tensor."""
    if not 0 < density <= 1:
        raise ValueError(f"{method}: density must be in (0, 1], got {density}")


@lru_cache(maxsize=256)
def table_of(quota: Quota, device: torch.device) -> QuotaTable:
    """On `device`, made once."""
    slots, firsts = quota.layout.slots, accumulate(quota.counts[:-1], initial=0)
    offsets, numels = [slot.offset for slot in slots], [slot.numel for slot in slots]
    rows = torch.tensor([quota.counts, [*firsts][: len(slots)], offsets, numels], dtype=torch.int64)
    return QuotaTable(*rows.to(device))

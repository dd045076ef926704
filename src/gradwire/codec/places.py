"""Places of the elements of a sparse message, k of n in a tensor, in order: the code of Elias and Fano.

With l = floor(log2(n / k)) the low l bits of a place are written as they are. The rest, h = place >> l, is in a plane
of k + ((n - 1) >> l) bits, in which the i-th place sets bit h + i. That is a length all ranks know, for 1 in 100 8.6
bits a place, and it may hold a place twice. First the low bits of all tensors without gaps, then the planes, each of
the two from a whole word on; the first bit of a word is its lowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codec.quota import Quota


class Bits(NamedTuple):
    """By tensor, int64 [K]."""

    low: Tensor  # l
    low_start: Tensor  # the bit where its low bits begin
    plane_start: Tensor  # the bit of the planes where its own begins


@dataclass(frozen=True)
class Code:
    """Where everything lies, for one bucket."""

    quota: Quota

    @classmethod
    def of(cls, quota: Quota) -> Code:
        """Kept for the last few."""
        return _code(quota)

    @cached_property
    def _sizes(self) -> list[tuple[int, int, int]]:
        """l, low bits and bits of the plane, of each tensor."""
        sizes = []
        for slot, count in zip(self.quota.layout, self.quota.counts, strict=True):
            low = (slot.numel // count).bit_length() - 1 if count else 0
            sizes.append((low, low * count, count + ((slot.numel - 1) >> low) if count else 0))
        return sizes

    @cached_property
    def low_words(self) -> int:
        return -(-sum(low for _, low, _ in self._sizes) // 32)

    @cached_property
    def plane_bits(self) -> int:
        return sum(plane for _, _, plane in self._sizes)

    @cached_property
    def words(self) -> int:
        return self.low_words + -(-self.plane_bits // 32)

    @cached_property
    def _tables(self) -> dict[torch.device, Bits]:
        return {}

    def bits(self, device: torch.device) -> Bits:
        """On `device`, made once."""
        if device not in self._tables:
            low, lows, planes = zip(*self._sizes, strict=True)
            starts = ([*accumulate(sizes, initial=0)][:-1] for sizes in (lows, planes))
            self._tables[device] = Bits(*torch.tensor([low, *starts], dtype=torch.int64).to(device))
        return self._tables[device]


@lru_cache(maxsize=256)
def _code(quota: Quota) -> Code:
    return Code(quota)


def pack(places: Tensor, tensor: Tensor, code: Code) -> Tensor:
    """Places [E] in their tensors, none smaller than the one before; tensor [E]. -> int32 [code.words]."""
    table, number = code.bits(places.device), code.quota.number(tensor)
    low = table.low[tensor]
    bit = table.low_start[tensor] + number * low
    field = (places & ~(-1 << low)) << (bit & 31)
    plane = table.plane_start[tensor] + (places >> low) + number
    words = torch.zeros(code.words + 1, dtype=torch.int64, device=places.device)  # no bit comes twice: a sum is an or
    words.index_add_(0, bit >> 5, field & 0xFFFFFFFF).index_add_(0, (bit >> 5) + 1, field >> 32)
    words.index_add_(0, code.low_words + (plane >> 5), 1 << (plane & 31))
    return words.view(torch.int32)[: 2 * code.words : 2]  # the lower halves


def unpack(words: Tensor, tensor: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Any int32 [code.words] -> places [E] within their tensors, and bool [], whether they were not."""
    device, quota = words.device, code.quota
    table, number, numel = code.bits(device), quota.number(tensor), quota.table(device).numels[tensor]
    low = table.low[tensor]
    bit = table.low_start[tensor] + number * low
    pairs = torch.cat([words, words.new_zeros(1)]).long() & 0xFFFFFFFF
    at = bit >> 5
    field = ((pairs[at] | pairs[at + 1] << 32) >> (bit & 31)) & ~(-1 << low)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    plane = ((words[code.low_words :, None] >> shifts) & 1).flatten()[: code.plane_bits]
    ones = plane.nonzero_static(size=quota.total)[:, 0]
    places = (ones - table.plane_start[tensor] - number) << low | field
    wrong = (plane.sum() != quota.total) | ((places < 0) | (places >= numel)).any()
    return torch.minimum(places.clamp_(min=0), numel - 1), wrong

"""Places of the elements of a sparse message, k of n in a tensor, in order: the code of Elias and Fano.

With l = floor(log2(n / k)) the low l bits of a place are written as they are. The rest, h = place >> l, is in a plane
of k + ((n - 1) >> l) bits, in which the i-th place sets bit h + i. That is a length all ranks know, for 1 in 100 8.6
bits a place, and it may hold a place twice. First the low bits of all tensors without gaps, then the planes, each of
the two from a whole word on; the first bit of a word is its lowest.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codec.quota import Quota, table_of
from gradwire.layout import Layout


class Entries(NamedTuple):
    """What is known of each entry before its place is, int64 [E]."""

    low: Tensor  # l
    bit: Tensor  # where its low bits begin
    plane: Tensor  # the bit of the planes that it sets if h = 0
    offset: Tensor  # of its tensor
    last: Tensor  # the last place in its tensor


class PlaceCode:
    """Where everything lies, for one bucket and one quota."""

    def __init__(self, quota: Quota) -> None:
        self.quota, self.n_entries = quota, quota.total
        lows, low_bits, plane_bits = [], [], []
        for slot, count in zip(quota.layout, quota.counts, strict=True):
            low = (slot.numel // count).bit_length() - 1 if count else 0
            lows.append(low)
            low_bits.append(low * count)
            plane_bits.append(count + ((slot.numel - 1) >> low) if count else 0)
        self.low_words, self.plane_bits = -(-sum(low_bits) // 32), sum(plane_bits)
        self.words = self.low_words + -(-self.plane_bits // 32)
        starts = ([*accumulate(sizes, initial=0)][:-1] for sizes in (low_bits, plane_bits))
        self._columns = [lows, *starts]
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """On `device`, made once, int64: k and the first entry of each tensor [K], and what its first has [5, K]."""
        if device not in self._tables:
            low, low_start, plane_start = torch.tensor(self._columns, dtype=torch.int64).to(device)
            counts, firsts, offsets, numels = table_of(self.quota, device)
            columns = torch.stack([low, low_start - firsts * low, plane_start - firsts, offsets, numels - 1])
            self._tables[device] = counts, firsts, columns
        return self._tables[device]

    def entries(self, device: torch.device) -> Entries:
        """Not kept: they would take more than the message."""
        counts, _, columns = self._table(device)
        low, bit, plane, offset, last = columns.repeat_interleave(counts, 1, output_size=self.n_entries)
        number = torch.arange(self.n_entries, device=device)
        return Entries(low, bit + number * low, plane + number, offset, last)

    def sent(self, values: Tensor) -> Tensor:
        """How many entries of each tensor have a value that is not 0, int64 [K]; values [E]."""
        counts, firsts, _ = self._table(values.device)
        # by a running sum: thousands of additions to the same few numbers would wait for one another on a GPU
        running = torch.cat([counts.new_zeros(1), (values != 0).cumsum(0)])
        return running[firsts + counts] - running[firsts]


@lru_cache(maxsize=256)  # both sides of an exchange ask for the same
def code_of(layout: Layout, density: float) -> PlaceCode:
    return PlaceCode(Quota.of(layout, density))


def pack(places: Tensor, code: PlaceCode) -> Tensor:
    """Flat places [E], none smaller than the one before -> int32 [code.words]."""
    entries = code.entries(places.device)
    within = places - entries.offset
    field = (within & ~(-1 << entries.low)) << (entries.bit & 31)
    plane = entries.plane + (within >> entries.low)
    words = torch.zeros(code.words + 1, dtype=torch.int64, device=places.device)  # no bit comes twice: a sum is an or
    at = entries.bit >> 5
    words.index_add_(0, at, field & 0xFFFFFFFF).index_add_(0, at + 1, field >> 32)
    words.index_add_(0, code.low_words + (plane >> 5), 1 << (plane & 31))
    return words.view(torch.int32)[: 2 * code.words : 2]  # the lower halves


def unpack(words: Tensor, code: PlaceCode, entries: Entries) -> tuple[Tensor, Tensor]:
    """Any int32 [code.words] -> flat places [E] within their tensors, and bool [], whether they were not."""
    pairs = torch.cat([words, words.new_zeros(1)]).long() & 0xFFFFFFFF
    at = entries.bit >> 5
    field = ((pairs[at] | pairs[at + 1] << 32) >> (entries.bit & 31)) & ~(-1 << entries.low)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    plane = ((words[code.low_words :, None] >> shifts) & 1).flatten()[: code.plane_bits]
    ones = plane.nonzero_static(size=code.n_entries)[:, 0]
    within = (ones - entries.plane) << entries.low | field
    wrong = (plane.sum() != code.n_entries) | ((within < 0) | (within > entries.last)).any()
    return torch.minimum(within.clamp_(min=0), entries.last) + entries.offset, wrong

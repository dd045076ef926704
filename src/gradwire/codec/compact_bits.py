"""Bit strings and runs of elements, for the compact format's reference: plain torch on int64.

A bit string is a vector of 32-bit words, bit i being bit i % 32 of word i // 32. Here each word sits in an int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = (1 << 32) - 1
SPARE = 2  # words behind the end: a field lies in two words, and an empty one may begin behind the last


def unsigned(words: Tensor) -> Tensor:
    """int32 words as int64 0 .. 2^32 - 1."""
    return words.long() & MASK


def signed(words: Tensor) -> Tensor:
    """int64 0 .. 2^32 - 1 as int32 words of the same bits."""
    return torch.where(words > MASK >> 1, words - (MASK + 1), words).int()


def deposit(words: Tensor, position: Tensor, value: Tensor) -> None:
    """Writes values below 2^32 at bit `position` into words that are zero there, with SPARE words behind the end.

    Fields do not overlap, so adding is the same as setting, and may be done in any order.
    """
    shifted, at = value << (position & 31), position >> 5
    words.index_add_(0, at, shifted & MASK)
    words.index_add_(0, at + 1, (shifted >> 32) & MASK)


def fetch(words: Tensor, position: Tensor, width: Tensor | int) -> Tensor:
    """The `width` < 32 bits at `position`, of words with SPARE words behind the end."""
    at = position >> 5
    pair = words[at] | (words[at + 1] << 32)
    return (pair >> (position & 31)) & ((torch.ones_like(position) << width) - 1)


def floor_log2(value: Tensor) -> Tensor:
    """floor(log2 value) of int64 below 2^25, 0 where the value is 0. Integers only: all devices agree."""
    powers = 2 ** torch.arange(1, 25, device=value.device)
    return torch.bucketize(value, powers, right=True)


@dataclass(frozen=True)
class BlockRuns:
    """Consecutive elements belong to one block: count [B] of them to each."""

    count: Tensor  # int64 [B]
    block: Tensor  # int64 [n]

    @classmethod
    def of(cls, count: Tensor) -> BlockRuns:
        return cls(count, torch.repeat_interleave(torch.arange(len(count), device=count.device), count))

    def ordinal(self) -> Tensor:
        """0, 1, ... within each block, [n]."""
        return torch.arange(len(self.block), device=self.block.device) - self._before()[self.block]

    def sums(self, value: Tensor) -> Tensor:
        """Sum of the values of this block up to and with this element, [n]."""
        total = torch.cat([value.new_zeros(1), value.cumsum(0)])
        return total[1:] - total[self._before()[self.block]]

    def totals(self, value: Tensor) -> Tensor:
        """Sum of the values of each block, [B]."""
        return torch.zeros_like(self.count).index_add_(0, self.block, value)

    def _before(self) -> Tensor:
        return self.count.cumsum(0) - self.count

"""How the compact format cuts a bucket into blocks, and how many words a message needs: the same on every rank.

Everything here follows from the layout and the capacity by integer arithmetic; nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.layout import Layout

# Elements of a full message in a block: 256 to 512. A block costs an entry of the directory, a count and half a word of
# padding, 40 to 60 bits, so 0.08 to 0.23 bits an element; larger blocks would leave a GPU's warps idle at high ratios.
ELEMENTS = 256
SHORTEST, LONGEST = 1 << 8, 1 << 24  # places in a block; the longest bounds the low bits of a gap to 23
POWERS = 2 ** np.arange(25)
MOST_WORDS = (1 << 31) - 1  # positions in a message are int32 for some kernels

Array = np.ndarray[Any, Any]


def block_length(numel: int, capacity: int) -> int:
    """Places in a block: the smallest power of two L with L * capacity / numel >= 256, within 2^8 .. 2^24."""
    wanted = -(-ELEMENTS * numel // capacity)
    return min(max(1 << (wanted - 1).bit_length(), SHORTEST), LONGEST)


def low_bits(length: int, count: int) -> int:
    """k = floor(log2((L - c) / c)), 0 where L < 2c: the bits of a gap that are not unary."""
    return max(((length - count) // count).bit_length() - 1, 0)


def count_bits(length: int, capacity: int) -> int:
    """Bits of c - 1, for c = 1 .. min(L, capacity)."""
    return (min(length, capacity) - 1).bit_length()


def room_words(numel: int, capacity: int, hybrid: bool = False) -> int:
    """Words that the payload of one tensor needs at most, however its n <= capacity elements lie. N = numel.

    A block of length L with c elements, whose gaps add up to at most L - c, has a low and a unary plane of
        c k + c + sum_i floor(gap_i / 2^k)  <=  c (k + 1) + (L - c) / 2^k  =:  line_k(L, c)
    bits, and its k is the one of the smallest line: going from k to k + 1 adds c and takes (L - c) / 2^(k+1), which is
    a gain as long as 2^(k+1) <= (L - c) / c. So the block costs at most line_K(L, c) for ANY K; take for all blocks
    the K of (N, capacity). Lines are linear in (L, c), so the blocks' sum is at most line_K(N, n), and lines grow
    with c (K + 1 >= 2^-K), so that is at most line_K(N, capacity); the sum is an integer, so at most its floor.
    Codes: sign and class are 3 bits, the extra bits of a tensor at most n (the encoder's choice): 4 n; hybrid: n.
    Each of the m <= min(blocks, n) blocks that are not empty has a count, of w bits at most (the longest block's), and
    rounds up to whole words: ceil(x / 32) <= (x + 31) / 32. Hence  floor((line + codes + m (w + 31)) / 32)  words.
    """
    if not capacity:
        return 0
    k = low_bits(numel, capacity)
    line = capacity * (k + 1) + ((numel - capacity) >> k)
    length = block_length(numel, capacity)
    filled = min(-(-numel // length), capacity)
    per_block = count_bits(min(length, numel), capacity) + 31
    return (line + capacity * (1 if hybrid else 4) + filled * per_block) // 32


@dataclass(frozen=True)
class Tables:
    """The geometry as tensors on one device. B blocks in order of their places, K tensors."""

    begin: Tensor  # int64 [B], first flat place of each block
    length: Tensor  # int64 [B], its places
    count_bits: Tensor  # int64 [B], the bits of its count
    entry: Tensor  # int64 [B], the first bit of its entry in the directory
    entry_bits: Tensor  # int64 [B]
    tensor: Tensor  # int64 [B], the tensor it belongs to
    first: Tensor  # int64 [K + 1], the first block of each tensor
    capacity: Tensor  # int64 [K]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a bucket: tensor k has first[k] .. first[k + 1] - 1, of lengths[k] places, the last one shorter."""

    layout: Layout
    capacity: tuple[int, ...]  # [K], the most elements of each tensor
    hybrid: bool  # codes are signs only
    lengths: tuple[int, ...]  # [K], powers of two
    first: tuple[int, ...]  # [K + 1]
    rooms: tuple[int, ...]  # [K], `room_words`

    @cached_property
    def entry_bits(self) -> tuple[int, ...]:
        """Bits of a directory entry, [K]: no payload is longer than the room of its tensor."""
        return tuple(room.bit_length() for room in self.rooms)

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """The first bit of each tensor's entries in the directory, [K + 1]."""
        counts = (after - before for before, after in pairwise(self.first))
        sizes = (count * bits for count, bits in zip(counts, self.entry_bits, strict=True))
        return tuple(accumulate(sizes, initial=0))

    @classmethod
    def of(cls, layout: Layout, capacity: Sequence[int], hybrid: bool = False) -> Blocks:
        """Kept for the last few (layout, capacity): both sides of an exchange ask for the same."""
        return _blocks(layout, tuple(capacity), hybrid)

    @property
    def count(self) -> int:
        """B."""
        return self.first[-1]

    @cached_property
    def directory_words(self) -> int:
        return -(-self.entries[-1] // 32)

    @cached_property
    def payload_words(self) -> int:
        return sum(self.rooms)

    @property
    def words(self) -> int:
        """Length of the body: directory and payload area."""
        return self.directory_words + self.payload_words

    @cached_property
    def _tables(self) -> dict[torch.device, Tables]:
        return {}

    def tables(self, device: torch.device) -> Tables:
        """The geometry on `device`, made once."""
        if device not in self._tables:
            self._tables[device] = Tables(*(torch.from_numpy(table).to(device) for table in self._arrays()))
        return self._tables[device]

    @cached_property
    def arrays(self) -> tuple[Array, Array]:
        """For compiled code: what `Tables` has of every block, [6, B], and the capacity, [K]."""
        *of_blocks, _, capacity = self._arrays()
        return np.stack(of_blocks), capacity

    def _arrays(self) -> tuple[Array, ...]:
        """In the order of `Tables`. By numpy, whose small operations take a third of torch's: a room changes often."""
        first, capacity, lengths = np.array(self.first), np.array(self.capacity), np.array(self.lengths)
        offsets = np.array([slot.offset for slot in self.layout])
        numels = np.array([slot.numel for slot in self.layout])
        tensor = np.repeat(np.arange(len(lengths)), np.diff(first))
        number = np.arange(self.count) - first[tensor]
        within = number * lengths[tensor]
        length = np.minimum(lengths[tensor], numels[tensor] - within)
        count_bits = np.searchsorted(POWERS, np.minimum(length, capacity[tensor]))  # the powers of two below it
        entry_bits = np.array(self.entry_bits)[tensor]
        entry = np.array(self.entries)[tensor] + number * entry_bits
        return offsets[tensor] + within, length, count_bits, entry, entry_bits, tensor, first, capacity


@lru_cache(maxsize=64)  # buckets of a step; the capacity changes from step to step
def _blocks(layout: Layout, capacity: tuple[int, ...], hybrid: bool) -> Blocks:
    numels = [slot.numel for slot in layout]
    if len(capacity) != len(numels) or not all(0 <= room <= n for room, n in zip(capacity, numels, strict=True)):
        raise ValueError(f"expected a capacity of 0 to numel for each of {len(numels)} tensors, got {capacity}")
    pairs = list(zip(numels, capacity, strict=True))
    lengths = tuple(block_length(numel, room) if room else SHORTEST for numel, room in pairs)
    counts = (-(-numel // length) if room else 0 for (numel, room), length in zip(pairs, lengths, strict=True))
    first = tuple(accumulate(counts, initial=0))
    rooms = tuple(room_words(numel, room, hybrid) for numel, room in pairs)
    blocks = Blocks(layout, capacity, hybrid, lengths, first, rooms)
    if blocks.words > MOST_WORDS:
        raise ValueError(f"a message of {blocks.words} words is longer than {MOST_WORDS}: use smaller buckets")
    return blocks

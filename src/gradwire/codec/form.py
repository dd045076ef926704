"""The form of a message: where its parts lie, how the compact format cuts a bucket into blocks, how long it is.

What all ranks know before they look into a message: it follows from the layout and the capacity by integer arithmetic,
and nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

WORDS, COMPACT, BARE = 1, 2, 3  # the formats of the body
VERSION = 2
MAGIC = int.from_bytes(b"GRWR", "little")
FIXED = 10  # words before the counts
STEPS = 1 << 31  # after as many the number of a step begins anew

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
        """The last ones are kept with the layout: both sides of an exchange ask for the same."""
        capacity = tuple(capacity)
        known: Blocks | None = layout.kept.get((Blocks, hybrid))
        if known is None or known.capacity != capacity:
            known = layout.kept[Blocks, hybrid] = _blocks(layout, capacity, hybrid)
        return known

    @cached_property
    def count(self) -> int:
        """B."""
        return self.first[-1]

    @cached_property
    def directory_words(self) -> int:
        return -(-self.entries[-1] // 32)

    @cached_property
    def payload_words(self) -> int:
        return sum(self.rooms)

    @cached_property
    def words(self) -> int:
        """Length of the body: directory and payload area."""
        return self.directory_words + self.payload_words

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What devices have worked out from it."""
        return {}

    def tables(self, device: torch.device) -> Tables:
        """The geometry on `device`, made once."""
        if (Tables, device) not in self.kept:
            self.kept[Tables, device] = Tables(*(torch.from_numpy(table).to(device) for table in self._arrays()))
        known: Tables = self.kept[Tables, device]
        return known

    @cached_property
    def arrays(self) -> tuple[Array, Array]:
        """For machine code: what `Tables` has of every block, [6, B], and the capacity, [K]."""
        *of_blocks, capacity = self._arrays()
        return np.stack(of_blocks), capacity

    def _arrays(self) -> tuple[Array, ...]:
        """In the order of `Tables`. By numpy, whose small operations take a third of torch's: a room changes often."""
        first, capacity, lengths = np.array(self.first), np.array(self.capacity), np.array(self.lengths)
        offsets, numels = (np.array(column, np.int64) for column in bounds(self.layout))
        tensor = np.repeat(np.arange(len(lengths)), np.diff(first))
        number = np.arange(self.count) - first[tensor]
        within = number * lengths[tensor]
        length = np.minimum(lengths[tensor], numels[tensor] - within)
        count_bits = np.searchsorted(POWERS, np.minimum(length, capacity[tensor]))  # the powers of two below it
        entry_bits = np.array(self.entry_bits)[tensor]
        entry = np.array(self.entries)[tensor] + number * entry_bits
        return offsets[tensor] + within, length, count_bits, entry, entry_bits, tensor, capacity


def bounds(layout: Layout) -> tuple[list[int], list[int]]:
    """The first place of every tensor, and its elements."""
    return [slot.offset for slot in layout.slots], [slot.numel for slot in layout.slots]


def _blocks(layout: Layout, capacity: tuple[int, ...], hybrid: bool) -> Blocks:
    numels = bounds(layout)[1]
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


@dataclass(frozen=True)
class Shape:
    """Where the parts of a bucket's message lie; `room` words for the body."""

    layout: Layout
    room: int
    chunk: int
    format: int
    capacity: tuple[int, ...] = ()  # [K], the most elements of each tensor, where there are such
    hybrid: bool = False  # with tau: codes are signs only, and the head's exponents mean nothing
    blocks: Blocks | None = None  # of the compact format

    @classmethod
    def of(cls, layout: Layout, capacity: tuple[int, ...], chunk: int, hybrid: bool, compact: bool) -> Shape:
        """Of sparse messages: the last ones are kept with the layout, because every step asks on both sides."""
        key = (Shape, chunk, hybrid, compact)
        known: Shape | None = layout.kept.get(key)
        if known is None or known.capacity != capacity:
            blocks = Blocks.of(layout, capacity, hybrid) if compact else None
            room, format = (sum(capacity), WORDS) if blocks is None else (blocks.words, COMPACT)
            known = layout.kept[key] = cls(layout, room, chunk, format, capacity, hybrid, blocks)
        return known

    @cached_property
    def chunks(self) -> int:
        return max(1, -(-self.layout.numel // self.chunk))

    @cached_property
    def counts(self) -> slice:
        return slice(FIXED, FIXED + (self.chunks if self.format != BARE else 0))

    @cached_property
    def passed(self) -> slice:
        return slice(self.counts.stop, self.counts.stop + self._tensors)

    @cached_property
    def exponents(self) -> slice:
        return slice(self.passed.stop, self.passed.stop + -(-self._tensors // 4))

    @cached_property
    def orders(self) -> slice:
        return slice(self.exponents.stop, self.exponents.stop + self._tensors * (self.format == COMPACT))

    @cached_property
    def body(self) -> slice:
        return slice(self.orders.stop, self.words)

    @cached_property
    def words(self) -> int:
        return int(self.orders.stop) + self.room

    @cached_property
    def _tensors(self) -> int:
        """That the head tells of one by one."""
        return 0 if self.format == BARE else len(self.layout.slots)

    @cached_property
    def most(self) -> int:
        """The words that may be counted; compact blocks count for themselves."""
        return self.room if self.format == WORDS else 0

    @cached_property
    def known(self) -> tuple[int, ...]:
        """The words 0 to 7, which are the same on every rank but for the flags; step 0."""
        digest = (int.from_bytes(self.layout.digest[i : i + 4], "little", signed=True) for i in (0, 4))
        return MAGIC, self.format << 16 | VERSION, *digest, 0, 0, len(self.layout.slots), self.chunks

    def fixed(self, step: int) -> list[int]:
        """`known` in a step."""
        return [*self.known[:4], step % STEPS, *self.known[5:]]

"""Names the tensors of a bucket: where each one lies in the flat vector."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One tensor of a bucket: `numel` elements from `offset`."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The 1-D view of this tensor in a flat vector."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True, eq=False)
class Layout:
    """The tensors of a bucket in order, without gaps. Equal layouts have equal digests on every rank.

    There is one object for each, made by `of`: tables are looked up by layout several times a step.
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Iterable[int]]]) -> Layout:
        """From (name, shape) pairs in bucket order."""
        pairs = tuple((name, tuple(shape)) for name, shape in tensors)
        found = _made.get(pairs)
        if found is None:
            ends = accumulate((math.prod(shape) for _, shape in pairs), initial=0)
            slots = (Slot(name, offset, shape) for (name, shape), offset in zip(pairs, ends, strict=False))
            found = _made.setdefault(pairs, cls(tuple(slots)))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.of, ([(slot.name, slot.shape) for slot in self.slots],)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that another model's bucket does not have."""
        text = "\n".join(f"{slot.name} {slot.shape}" for slot in self.slots)
        return hashlib.sha256(text.encode()).digest()[:8]

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What others have worked out from this layout, under names of their own; it goes when the layout goes."""
        return {}

    def lengths(self, device: torch.device) -> Tensor:
        """Elements of each tensor, int64 [K], on `device`; kept, because every step asks for it."""
        if device not in self.kept:
            self.kept[device] = torch.tensor([slot.numel for slot in self.slots], dtype=torch.int64, device=device)
        known: Tensor = self.kept[device]
        return known

    def spread(self, values: Tensor) -> Tensor:
        """One value a tensor, [K], becomes one value an element, [N]."""
        return torch.repeat_interleave(values, self.lengths(values.device), output_size=self.numel)

    def slot_of(self, index: Tensor) -> Tensor:
        """Which tensor each flat index belongs to, int64 [n]."""
        return torch.bucketize(index, self.lengths(index.device).cumsum(0), right=True)


_made: WeakValueDictionary[tuple[tuple[str, tuple[int, ...]], ...], Layout] = WeakValueDictionary()


def in_shape(flat: Tensor, like: Tensor) -> Tensor:
    """A flat vector as a view in a parameter's shape, in the order in which DDP's buckets hold it: its own strides."""
    expected = 1
    for size, stride in sorted(zip(like.shape, like.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:  # overlapping or with gaps: DDP takes the plain order
            return flat.view(like.shape)
        expected *= size
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

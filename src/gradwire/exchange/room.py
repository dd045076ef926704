"""How long a message is: known to all ranks before it is sent, from what passed one step earlier.

Every tensor has room of its own, so that the buckets it happens to lie in change nothing. Elements that do not fit stay
in their residual. The messages of a step never cost more than the all-reduce of plain DDP: a rank passes on (W - 1)
messages here and 2 (W - 1) / W of the gradient there, so its messages may have 2 / W of the gradient's bytes. Where
more is needed, and in the first step, everything is sent, in float32: a dense step. A tiny model has only such steps.

With a density, the same for all tensors, rooms follow from it and there are no dense steps: a method's own, or the one
whose messages fit a budget.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.codec.interface import CHUNK
from gradwire.codec.quota import Quota
from gradwire.layout import Layout

# Between two dense steps: a dense step clears every residual, and the first look at an element passes it far too often
# (one in five at alpha = 1.5 on pure noise). Dense again at once would never get out of that.
REST = 8
# Room above the last count. Small models near convergence vary more from rank to rank and step to step than any such
# room covers (on digits 4 to 7 % of the passing elements wait a step); more room would be paid in every step.
HEADROOM = 1.125
HEAD_WORDS = 14  # at most, a tensor's share of its message's head
SCALES = 1 << 20  # that a room may be scaled down to: finer than one element in a million
# Densities have four digits, down to 1e-9, which is one element of every tensor: a finer one would fit no better, and
# would make new tables on a GPU for it.
DECADES, EACH = 9, 9000
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's own limits

Words = Callable[[int, int], int]  # (a tensor's elements, how many of them fit) -> words of the message


def padded(count: int) -> int:
    """Room for a count that was `count` one step ago."""
    return math.ceil(HEADROOM * count + 2 * math.sqrt(count) + 4) if count else 4


def above(wanted: int) -> int:
    """Room for a tensor of which about `wanted` elements pass by a density.

    Of gradients drawn from normal and heavy-tailed laws 0.1 % of those that passed waited, 1 % with no room above.
    """
    return wanted + math.ceil(math.sqrt(wanted) / 4)


def density_at(place: int) -> float:
    """The densities in ascending order, 0 .. DECADES * EACH."""
    return float(f"{1000 + place % EACH}e{place // EACH - DECADES - 3}")


def most_buckets(n_bytes: int, dtypes: int = 1, limit: int = BUCKET) -> int:
    """How many buckets DDP makes at most: each has at least `limit` bytes, but for the first and last of a dtype."""
    first, limit = min(FIRST_BUCKET, limit), max(1, limit)
    return dtypes * (1 + (n_bytes >= first)) + max(0, n_bytes - first) // limit


@dataclass(frozen=True)
class RoomPlan:
    """One step's decision: everything is sent, or how much the room of every tensor is scaled down.

    density: of every tensor that may pass; None: whatever passes by the method's options.
    """

    dense: bool
    scale: float = 1.0
    density: float | None = None


@dataclass
class Capacity:
    """Follows the largest count that passed over the ranks, by parameter, at a lag of one step."""

    dense_bytes: int  # of the gradient, as plain DDP sends it
    world_size: int
    numels: dict[str, int]  # by parameter
    buckets: int = 1  # of a step at most
    passed: dict[str, int] = field(default_factory=dict)
    since_dense: int = REST
    _known: tuple[tuple[Any, ...], float | None] = field(default=((), None), repr=False, compare=False)

    @classmethod
    def of_model(cls, root: nn.Module, parameters: Mapping[str, Tensor], world_size: int) -> Capacity:
        """root: says how large its buckets are, if it is DDP's; else every tensor may be one."""
        n_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        limit = int(min([getattr(root, "bucket_bytes_cap", 1), *getattr(root, "bucket_bytes_cap_list", ())]))
        buckets = most_buckets(n_bytes, len({p.dtype for p in parameters.values()}), limit)
        return cls(n_bytes, world_size, {name: p.numel() for name, p in parameters.items()}, buckets)

    def plan(self, words: Words, budget: int | None = None, density: float | None = None) -> RoomPlan:
        """The next step's decision, the same on every rank.

        budget: bytes that one worker's messages may have; density: the method's own.
        """
        if self._known[0] != (words, budget, density):
            self._known = (words, budget, density), self._density(words, budget, density)
        if self._known[1] is not None:
            return RoomPlan(dense=False, density=self._known[1])
        if not self.passed:
            return RoomPlan(dense=True)
        limit = self.dense_bytes // (2 * self.world_size) - HEAD_WORDS * len(self.passed)
        fits = self._need(words, 1.0) <= limit
        if limit < padded(0) * len(self.passed) or (not fits and self.since_dense >= REST):
            return RoomPlan(dense=True)
        return RoomPlan(dense=False, scale=1.0 if fits else self._scale(words, limit))

    def _density(self, words: Words, budget: int | None, density: float | None) -> float | None:
        """The largest that fits the budget, else the least; or the method's own. None: rooms follow what passed.

        Messages that would cost more than the all-reduce are none of a density.
        """
        most = 2 * self.dense_bytes // self.world_size  # bytes of a worker's messages that cost as much
        if budget is not None:
            places, limit = range(DECADES * EACH + 1), min(budget, most)
            place = bisect_right(places, limit, lo=1, key=lambda place: self._bytes(words, density_at(place)))
            return density_at(place - 1)
        return density if density is not None and self._bytes(words, density) <= most else None

    def _need(self, words: Words, scale: float) -> int:
        """Words of a step's messages without their heads."""
        rooms = ((self.numels[name], math.floor(padded(count) * scale)) for name, count in self.passed.items())
        return sum(words(numel, min(room, numel)) for numel, room in rooms)

    def _scale(self, words: Words, limit: int) -> float:
        """The largest part of every room that fits together, to a millionth."""
        place = bisect_right(range(SCALES), limit, lo=1, key=lambda place: self._need(words, place / SCALES))
        return (place - 1) / SCALES

    def least(self, words: Words) -> int:
        """Bytes of the smallest messages of a step: one element of every tensor."""
        return self._bytes(words, density_at(0))

    def _bytes(self, words: Words, density: float) -> int:
        """Of a step's messages at most, with their heads (codec/header.py), whatever buckets the tensors lie in."""
        layout = Layout.of((name, (numel,)) for name, numel in self.numels.items())
        rooms = zip(layout.slots, Quota.of(layout, density).counts, strict=True)
        bodies = sum(words(slot.numel, min(above(wanted), slot.numel)) for slot, wanted in rooms)
        tensors, buckets = len(layout), min(self.buckets, len(layout))
        chunks = buckets + layout.numel // CHUNK
        return WORD_BYTES * (bodies + FIXED * buckets + chunks + 2 * tensors + (tensors + 3 * buckets) // 4)

    def of(self, layout: Layout, plan: RoomPlan) -> tuple[int, ...]:
        """Elements that fit into this bucket's message, by tensor."""
        if plan.dense:
            return (0,) * len(layout.slots)
        if plan.density is not None:  # as much as is wanted, or as little as passed
            every = zip(layout.slots, map(above, Quota.of(layout, plan.density).counts), strict=True)
            return tuple(min(room, slot.numel, padded(self.passed.get(slot.name, room))) for slot, room in every)
        # a tensor that had no gradient so far is about to be looked at for the first time
        counts = (self.passed.get(slot.name, slot.numel // 4) for slot in layout.slots)
        rooms = (math.floor(padded(count) * plan.scale) for count in counts)
        return tuple(min(room, slot.numel) for room, slot in zip(rooms, layout.slots, strict=True))

    def note(self, layout: Layout, passed: Sequence[int]) -> None:
        """Takes the counts of one bucket; a parameter that no rank had a gradient for keeps its last one."""
        for name, count in zip(layout.names, passed, strict=True):
            if count >= 0:
                self.passed[name] = count

    def end_step(self, plan: RoomPlan) -> None:
        self.since_dense = 0 if plan.dense else min(REST, self.since_dense + 1)

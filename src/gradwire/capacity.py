"""How long a message is: known to all ranks before it is sent, from what passed one step earlier.

Every tensor has room of its own, so that the buckets it happens to lie in change nothing. Elements that do not fit stay
in their residual. The messages of a step never cost more than the all-reduce of plain DDP: a rank passes on (W - 1)
messages here and 2 (W - 1) / W of the gradient there, so its messages may have 2 / W of the gradient's bytes. Where
more is needed, and in the first step, everything is sent, in float32: a dense step. A tiny model has only such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradwire.layout import Layout

# Between two dense steps: a dense step clears every residual, and the first look at an element passes it far too often
# (one in five at alpha = 1.5 on pure noise). Dense again at once would never get out of that.
REST = 8
# Room above the last count. Small models near convergence vary more from rank to rank and step to step than any such
# room covers (on digits 4 to 7 % of the passing elements wait a step); more room would be paid in every step.
HEADROOM = 1.125
HEAD_WORDS = 14  # at most, a tensor's share of its message's head
STEPS = 20  # halvings in search of a scale: finer than one element in a million

Words = Callable[[int, int], int]  # (a tensor's elements, how many of them fit) -> words of the message


def padded(count: int) -> int:
    """Room for a count that was `count` one step ago."""
    return math.ceil(HEADROOM * count + 2 * math.sqrt(count) + 4) if count else 4


@dataclass(frozen=True)
class Plan:
    """One step's decision: everything is sent, or how much the room of every tensor is scaled down."""

    dense: bool
    scale: float = 1.0


@dataclass
class Capacity:
    """Follows the largest count that passed over the ranks, by parameter, at a lag of one step."""

    dense_bytes: int  # of the gradient, as plain DDP sends it
    world_size: int
    numels: dict[str, int]  # by parameter
    passed: dict[str, int] = field(default_factory=dict)
    since_dense: int = REST

    def plan(self, words: Words) -> Plan:
        """The next step's decision, the same on every rank."""
        if not self.passed:
            return Plan(dense=True)
        limit = self.dense_bytes // (2 * self.world_size) - HEAD_WORDS * len(self.passed)
        fits = self._need(words, 1.0) <= limit
        if limit < padded(0) * len(self.passed) or (not fits and self.since_dense >= REST):
            return Plan(dense=True)
        return Plan(dense=False, scale=1.0 if fits else self._scale(words, limit))

    def _need(self, words: Words, scale: float) -> int:
        """Words of a step's messages without their heads."""
        rooms = ((self.numels[name], math.floor(padded(count) * scale)) for name, count in self.passed.items())
        return sum(words(numel, min(room, numel)) for numel, room in rooms)

    def _scale(self, words: Words, limit: int) -> float:
        """The largest part of every room that fits together, to a millionth."""
        fits, exceeds = 0.0, 1.0
        for _ in range(STEPS):
            middle = (fits + exceeds) / 2
            fits, exceeds = (middle, exceeds) if self._need(words, middle) <= limit else (fits, middle)
        return fits

    def of(self, layout: Layout, plan: Plan) -> tuple[int, ...]:
        """Elements that fit into this bucket's message, by tensor."""
        if plan.dense:
            return (0,) * len(layout)
        # a tensor that had no gradient so far is about to be looked at for the first time
        counts = (self.passed.get(slot.name, slot.numel // 4) for slot in layout)
        wanted = (math.floor(padded(count) * plan.scale) for count in counts)
        return tuple(min(room, slot.numel) for room, slot in zip(wanted, layout, strict=True))

    def note(self, layout: Layout, passed: Sequence[int]) -> None:
        """Takes the counts of one bucket; a parameter that no rank had a gradient for keeps its last one."""
        for name, count in zip(layout.names, passed, strict=True):
            if count >= 0:
                self.passed[name] = count

    def end_step(self, plan: Plan) -> None:
        self.since_dense = 0 if plan.dense else min(REST, self.since_dense + 1)

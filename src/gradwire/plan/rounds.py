"""Local steps, event by event: how long a round takes, and how long of it the training waits for the other workers.

A round's fragments are sent after inner steps of their own, and each has to be there `delay` steps later. One courier
carries them in the order in which they were sent, beside the training.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from gradwire.local_steps.fragments import sent_after

ROUNDS = 8  # that are played: the first four come to rest, the others count


@dataclass(frozen=True)
class RoundCost:
    """What of a recipe says how long a round takes (local_steps/recipe.py), and the training's own work for it."""

    every: int  # inner steps of a round
    fragments: int = 1  # that are exchanged by themselves, all of about as many elements
    delay: int = 0  # inner steps beside which an exchange goes on
    begin_ns: float = 0.0  # an element: delta, decay
    end_ns: float = 0.0  # an element: the outer step, and the weights written


@dataclass(frozen=True)
class Exchange:
    """Of one fragment, in ms."""

    begin_ms: float  # of the training, before it is sent
    carried_ms: float  # encode, collectives, decode, if the courier has nothing else to do
    slowed_ms: float  # that the courier's work takes from a training that goes on beside it
    end_ms: float  # of the training, when it has come


def round_times(local: RoundCost, inner_ms: float, exchange: Exchange) -> tuple[float, float]:
    """(how long a round takes, how long of it the training waits), when every round takes as long as the one before."""
    play = _Play(local, inner_ms, exchange)
    ends = []
    for number in range(ROUNDS):
        for step, count in sends(local.every, local.fragments):
            play.send(number * local.every + step, count)
        ends.append((play.now, play.waited))
    (before, waited_before), (after, waited_after) = ends[ROUNDS // 2 - 1], ends[-1]
    counted = ROUNDS - ROUNDS // 2
    round_ms, waiting_ms = (after - before) / counted, (waited_after - waited_before) / counted
    # a courier with a little more to do than there is time for is late only after many rounds
    late_ms = max(0.0, local.fragments * exchange.carried_ms - round_ms)
    return round_ms + late_ms, waiting_ms + late_ms


@lru_cache
def sends(every: int, fragments: int) -> list[tuple[int, int]]:
    """(inner step of a round, how many fragments are sent after it), where there are any."""
    found = ((step, len(sent_after(step, every, fragments))) for step in range(1, every + 1))
    return [(step, count) for step, count in found if count]


class _Play:
    """The training's clock, and the courier's."""

    def __init__(self, local: RoundCost, inner_ms: float, exchange: Exchange) -> None:
        self.local, self.inner_ms, self.exchange = local, inner_ms, exchange
        self.now = self.waited = self.free = 0.0
        self.step = 0
        self.flights: deque[tuple[int, float]] = deque()  # (the step after which it is wanted, arrives at)

    def send(self, step: int, count: int) -> None:
        """Trains until after this step, receives what is wanted by then, and sends so many fragments."""
        while self.flights and self.flights[0][0] <= step:
            self._receive()
        self._train(step)
        for _ in range(count):
            self.now += self.exchange.begin_ms
            self.free = max(self.free, self.now) + self.exchange.carried_ms
            self.flights.append((step + self.local.delay, self.free))
        while self.flights and self.local.delay == 0:
            self._receive()

    def _train(self, step: int) -> None:
        self.now += (step - self.step) * self.inner_ms
        self.step = step

    def _receive(self) -> None:
        """The first of those on their way. Beside the training the courier has slowed it down."""
        wanted, arrival = self.flights.popleft()
        self._train(wanted)
        if self.local.delay:
            self.now += self.exchange.slowed_ms
        self.waited += max(0.0, arrival - self.now)
        self.now = max(self.now, arrival) + self.exchange.end_ms

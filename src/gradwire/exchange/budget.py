"""A budget in bytes: the rate that a user writes, and how long a step takes, a number that all ranks agree on.

In a step a worker's link carries W - 1 messages upwards, because a ring passes each of them on. So a rate allows
messages of  rate x time / (W - 1)  bytes. Every rank measures the time, from end of step to end of step on its host. At
the same steps everywhere the ranks gather their figures, and the median of these is used from the next step on.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gradwire.errors import AttachError
from gradwire.methods.base import Compressor

if TYPE_CHECKING:
    from gradwire.exchange.courier import Courier, Flight
    from gradwire.exchange.room import Capacity

EARLY, EVERY = (2, 4, 8), 10  # steps after which the ranks gather, then each so many
FEW = 10  # steps whose mean is a rank's figure: as many as have messages of one length
PAUSE = 2  # what takes longer than so many times the median is no step: an evaluation, a checkpoint
MOVED = 0.05  # a time that differs by less leaves everything as it is: rooms and the tables on a GPU stay


def check(compressor: Compressor, capacity: Capacity) -> None:
    """Refuses a budget that no step of this model can keep."""
    most = compressor.most_bytes
    if most is not None and most < (least := capacity.least(compressor.words)):
        raise AttachError(
            f"max_bytes_per_step={most} is too little for this model: a step needs at least {least} bytes, which are "
            f"the heads of its messages and one element of each of its {len(capacity.numels)} tensors"
        )


class Budget:
    """How many bytes one worker's messages of a step may have together, the same on every rank."""

    def __init__(self, world_size: int) -> None:
        self.messages = max(1, world_size - 1)  # that a link carries upwards for each one that is sent
        self.rate: float | None = None
        self.step_ns = 0  # what all ranks agreed on; 0: nothing yet
        self.n_bytes: int | None = None  # None: no budget. 0, before a step was measured: the least
        self._least = 0  # bytes that a step needs
        self._warned = False
        self._asked: Flight | None = None
        self._begin()

    def _begin(self) -> None:
        self._ends: deque[int] = deque(maxlen=FEW + 1)
        self._n_ends = 0

    def use(self, compressor: Compressor, capacity: Capacity) -> None:
        """The budget of this compressor from the next step on."""
        before, self.rate = self.rate, compressor.most_rate
        self.n_bytes = compressor.most_bytes
        self._agreed(0 if before is None or self.rate is None else self.step_ns)  # none was measured, or is to be
        if self.rate != before:
            self._warned = False
            self._begin()
        self._least = 0 if self.rate is None else capacity.least(compressor.words)

    def restore(self, step_ns: int) -> None:
        """Goes on with a time of another run."""
        self._agreed(step_ns)
        self._begin()

    def _agreed(self, step_ns: int) -> None:
        self.step_ns = step_ns
        if self.rate is not None:
            self.n_bytes = int(self.rate * step_ns / 1e9 / self.messages)

    def end_step(self) -> None:
        """Looks at the clock: for a rate alone."""
        self._ends.append(time.perf_counter_ns())
        self._n_ends += 1

    @property
    def due(self) -> bool:
        """Whether the step that begins now gathers the figures."""
        return self._n_ends in EARLY or (self._n_ends > 0 and self._n_ends % EVERY == 0)

    def ask(self, courier: Courier, device: torch.device) -> None:
        """Once a step, before its first message: there all ranks begin their collectives in the same order."""
        if self._asked is None:
            self._asked = courier.gather(torch.tensor([self._figure()], dtype=torch.int64, device=device))

    def _figure(self) -> int:
        """This rank's time of a step. A mean, as the rate is: a median would be short where steps vary."""
        times = [after - before for before, after in pairwise(self._ends)]
        most = PAUSE * statistics.median_low(times)
        steps = [one for one in times if one <= most]
        return max(1, sum(steps) // len(steps))

    def hear(self) -> None:
        """At the end of that step, when all of its messages have arrived."""
        if self._asked is None:
            return
        figures, self._asked = self._asked.wait().flatten().tolist(), None
        figure = statistics.median_low(figures)
        if abs(figure - self.step_ns) > MOVED * self.step_ns:
            self._agreed(figure)
        if self.n_bytes is not None and self.n_bytes < self._least and not self._warned:
            self._warned = True
            needed = 8 * self._least * self.messages / self.step_ns * 1e3
            warnings.warn(
                f"gradwire: the budget allows messages of {self.n_bytes} bytes in a step of {self.step_ns / 1e6:.3g} "
                f"ms, and this model needs {self._least} at least: these are sent, {needed:.3g} Mbit/s",
                stacklevel=1,
            )

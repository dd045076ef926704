"""When things happen in a step of one rank, by its own clock: the reducer says what it sees, nothing is waited for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.layout import Layout
from gradwire.plan.costs import usual


@dataclass
class Times:
    """One step, in seconds of the clock."""

    begin: float
    ready: list[tuple[float, Layout]] = field(default_factory=list)  # every bucket
    arrived: float = 0.0  # the last future
    end: float = 0.0

    @property
    def step_ms(self) -> float:
        return 1e3 * (self.end - self.begin)


class Clock:
    """Keeps the last steps. A step ends with the optimizer's."""

    def __init__(self, keep: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._steps = now, deque[Times](maxlen=keep)
        self._current: Times | None = None  # the first step has no beginning

    def ready(self, layout: Layout) -> None:
        """A bucket is ready."""
        if self._current is not None:
            self._current.ready.append((self._now(), layout))

    def arrived(self) -> None:
        """A future is resolved; called from any thread."""
        if self._current is not None:
            self._current.arrived = self._now()

    def stepped(self) -> None:
        """The optimizer has stepped: a step ends and the next one begins."""
        now = self._now()
        if self._current is not None:
            self._current.end = now
            self._steps.append(self._current)
        self._current = Times(now)

    def forget(self) -> None:
        """What was measured was of another method; the step under way does not count either."""
        self.drop()
        self._current = None

    def drop(self) -> None:
        """The steps so far do not count."""
        self._steps.clear()

    def step_ms(self) -> float:
        """The mean without the longest. Ranks wait for each other, so that each has the time of all in the sum."""
        return usual(times.step_ms for times in self._steps)

    def recent_ms(self) -> tuple[float, float]:
        """The shorter and the longer of the last two steps."""
        last = [times.step_ms for times in list(self._steps)[-2:]]
        return min(last), max(last)

    def layouts(self) -> list[Layout]:
        """The buckets, as the last step had them."""
        *_, last = (times for times in self._steps if times.ready)
        return [layout for _, layout in last.ready]

    def parts(self) -> tuple[float, float, float]:
        """(forward, backward, after) in ms, medians: what a step takes without any exchange."""
        columns = zip(*(_parts(times) for times in self._steps if times.ready), strict=True)
        forward, backward, after = (statistics.median(column) for column in columns)
        return forward, backward, after


def _parts(times: Times) -> tuple[float, float, float]:
    """The backward is taken to make buckets ready at an even pace, so that its beginning follows from the first two."""
    (first, head), (last, _) = times.ready[0], times.ready[-1]
    numel = sum(layout.numel for _, layout in times.ready)
    backward = (last - first) * numel / max(1, numel - head.numel)
    forward = max(0.0, last - backward - times.begin)
    return 1e3 * forward, 1e3 * backward, 1e3 * max(0.0, times.end - max(last, times.arrived))

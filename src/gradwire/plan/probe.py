"""Measures the links between the workers: collectives of growing sizes, of both kinds.

All times are the slowest rank's, by a maximum over the ranks. So all ranks hold the same numbers, bit for bit, and what
follows from them is the same everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradwire.exchange.courier import begin_gather, device_of
from gradwire.plan.model import FLOAT_BYTES, Network

FIRST, GROWTH, LARGEST = 1 << 10, 4, 16 << 20  # bytes on the link
LEAP, LEVEL = 16, 1.5  # the growth while a size takes hardly longer than the first: it is not the bytes that take time
LONG_MS = 100.0  # a transfer that takes so long says what the link can do: a burst and the hops are little of it
BULK = 1 << 16  # bytes that are tried however short the time is: fewer say nothing of the rate
FEWEST, MOST = 3, 30  # turns of a size; of three one may be disturbed
ENOUGH_MS = 40.0  # turns of a size are as many as take so long; longer, if there is more than a second in all

Point = tuple[float, float, float]  # bytes on the link, ms of a sum, ms of a gather


def probe(group: dist.ProcessGroup, device: torch.device, *, at_most_s: float = 4.0) -> Network:
    """Collective; the same result on every rank.

    A transfer that has begun is ended, so on a link of less than 1 Mbit/s it may take longer than `at_most_s`.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Network(1, math.inf, 0.0)
    deadline, enough_ms = time.perf_counter() + at_most_s, ENOUGH_MS * max(1.0, at_most_s)
    ring = _Ring(group, device_of(group, device), Network(world_size, math.inf, 0.0), deadline, enough_ms)
    ring.times(FIRST, gather=False, turns=1)  # connections are made when they are first used
    ring.times(FIRST, gather=True, turns=1)
    points: list[Point] = []
    n_bytes = FIRST
    while n_bytes <= LARGEST:
        points.append((n_bytes, ring.usual_ms(n_bytes, gather=False), ring.usual_ms(n_bytes, gather=True)))
        longest = max(points[-1][1:])
        if longest >= LONG_MS or (n_bytes >= BULK and ring.late(2 * GROWTH * longest)):
            break
        n_bytes *= LEAP if longest < LEVEL * max(points[0][1:]) else GROWTH
    return network_of(world_size, points)


def network_of(world_size: int, points: Sequence[Point]) -> Network:
    """The latency of the smallest, the rate of the largest, and how each differs from what these come to."""
    hops = world_size - 1
    latency_ms = statistics.mean((points[0][1] / (2 * hops), points[0][2] / hops))
    plain = Network(world_size, rate(points), latency_ms)
    curve = tuple(
        (float(n_bytes), summed / plain.collective_ms(n_bytes, False), gathered / plain.collective_ms(n_bytes, True))
        for n_bytes, summed, gathered in points
    )
    return replace(plain, curve=curve)


def rate(points: Sequence[Point]) -> float:
    """Mbit/s of what the largest sum has more than the one before: without the hops, and without what a burst saved."""
    n_bytes, took = points[-1][:2]
    if len(points) > 1 and took > 2 * points[-2][1]:  # else it is not the bytes that take the time
        n_bytes, took = n_bytes - points[-2][0], took - points[-2][1]
    return n_bytes * 8 / 1e3 / took


@dataclass
class _Ring:
    """Collectives, timed; whether to go on is decided from times that all ranks know."""

    group: dist.ProcessGroup
    device: torch.device
    empty: Network  # of as many workers
    deadline: float  # of this rank's clock
    enough_ms: float  # of the turns of a size

    def usual_ms(self, n_bytes: int, gather: bool) -> float:
        """The median of several."""
        first = self.times(n_bytes, gather, 1)
        turns = min(MOST, max(FEWEST, round(self.enough_ms / first)))
        if self.late(turns * first):
            turns = FEWEST if n_bytes < BULK else 1
        return self.times(n_bytes, gather, turns) if turns > 1 else first

    def times(self, n_bytes: int, gather: bool, turns: int) -> float:
        """So many collectives in a row that bring about so many bytes over every link: the usual time of one."""
        workers = self.empty.workers
        numel = max(1 if gather else workers, round(n_bytes / self.empty.on_link(FLOAT_BYTES, gather)))
        own = torch.zeros(numel, device=self.device)
        out = torch.empty(workers * numel if gather else 0, device=self.device)
        took = []
        self._largest(0.0)  # all ranks begin together
        for _ in range(turns):
            begin = time.perf_counter()
            if gather:
                begin_gather(out, own, self.group).wait()
            else:
                dist.all_reduce(own, group=self.group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took.append(1e3 * (time.perf_counter() - begin))
        return self._largest(statistics.median(took))

    def late(self, next_ms: float) -> bool:
        """Whether any rank has no time left for so much more."""
        return self._largest(time.perf_counter() + next_ms / 1e3 - self.deadline) > 0

    def _largest(self, number: float) -> float:
        """Over the ranks."""
        told = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return told.item()

"""Measures the links between the workers: small collectives for the latency, growing ones for the rate."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.exchange import all_gather
from gradwire.plan.model import FLOAT_BYTES, Network

SMALL = 64  # elements that every hop of a small sum carries: fewer would leave hops out
SMALL_TURNS, SMALL_S = 9, 0.3  # of each kind; so long at most
FIRST, GROWTH, LARGEST = 16_384, 4, 16 << 20  # bytes on the link
LONG_MS = 100.0  # a transfer that takes so long says what the link can do; a burst and the hops are little of it
TURNS = 3


@dataclass
class _Ring:
    """Collectives of one kind, timed; whether to go on is decided from a time that all ranks know."""

    group: dist.ProcessGroup
    device: torch.device
    gather: bool
    deadline: float  # of this rank's clock
    empty: Network = field(init=False)

    def __post_init__(self) -> None:
        self.empty = Network(dist.get_world_size(self.group), math.inf, 0.0)

    def time_ms(self, n_bytes: int) -> float:
        """One collective that brings about so many bytes over every link; the slowest rank's time."""
        numel = max(1, round(n_bytes / self.empty.on_link(FLOAT_BYTES, self.gather)))
        own = torch.zeros(numel, device=self.device)
        out = torch.empty(self.empty.workers * numel if self.gather else 0, device=self.device)
        self.shared(0.0)  # all begin together
        begin = time.perf_counter()
        if self.gather:
            all_gather(out, own, group=self.group)
        else:
            dist.all_reduce(own, group=self.group)
        self._synchronize()
        return self.shared(1e3 * (time.perf_counter() - begin))

    def shared(self, number: float) -> float:
        """The largest over the ranks."""
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return float(told)

    def late(self, next_ms: float = 0.0) -> bool:
        """Whether any rank has no time left for so much more."""
        return self.shared(time.perf_counter() + next_ms / 1e3 - self.deadline) > 0

    def latency_ms(self) -> float:
        """Of one hop."""
        n_bytes = round(self.empty.on_link(SMALL * self.empty.workers * FLOAT_BYTES, gather=False))
        n_bytes = SMALL * FLOAT_BYTES * (self.empty.workers - 1) if self.gather else n_bytes
        first = self.time_ms(n_bytes)  # connections are made when they are first used
        turns = min(SMALL_TURNS, max(1, int(SMALL_S * 1e3 / max(first, 1e-3))))
        hops = (self.empty.workers - 1) * (1 if self.gather else 2)
        return statistics.median(self.time_ms(n_bytes) for _ in range(turns)) / hops

    def mbit(self) -> float:
        """Of the link: what the bytes take by which the largest transfer that there was time for exceeds the first.

        Of each the shortest counts: what else slows a transfer comes and goes.
        """
        first = [self.time_ms(FIRST) for _ in range(TURNS)]
        n_bytes, took = FIRST, first
        while took[0] < LONG_MS and n_bytes * GROWTH <= LARGEST and not self.late(GROWTH * took[0]):
            n_bytes *= GROWTH
            took = [self.time_ms(n_bytes)]
        while len(took) < TURNS and not self.late(took[0]):
            took.append(self.time_ms(n_bytes))
        whole = min(took)
        if n_bytes == FIRST:  # the link is slow, or time is short
            return n_bytes * 8 / 1e3 / whole
        return (n_bytes - FIRST) * 8 / 1e3 / max(whole - min(first), whole / 2)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def probe(group: dist.ProcessGroup, device: torch.device, *, at_most_s: float = 2.0) -> Network:
    """Collective; the same result on every rank, bit for bit: the median latency, the slowest rate.

    A transfer that has begun is ended, so on a link of less than 1 Mbit/s it takes longer than `at_most_s`.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Network(1, math.inf, 0.0)
    where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    begin = time.perf_counter()
    sums = _Ring(group, where, gather=False, deadline=begin + at_most_s / 2)
    gathers = _Ring(group, where, gather=True, deadline=begin + at_most_s)
    latencies = [sums.latency_ms(), gathers.latency_ms()]
    rates = [sums.mbit(), gathers.mbit()]
    return combine(_everyones(group, torch.tensor([*latencies, *rates], dtype=torch.float64, device=where)).tolist())


def combine(rows: list[list[float]]) -> Network:
    """A row a rank: latency of sums and of gathers, rate of sums and of gathers."""
    columns = list(zip(*rows, strict=True))
    latency_ms = statistics.median(statistics.mean(row[:2]) for row in rows)
    mbit, gathered = min(columns[2]), min(columns[3])
    return Network(len(rows), mbit, latency_ms, gather=gathered / mbit)


def _everyones(group: dist.ProcessGroup, numbers: Tensor) -> Tensor:
    """A row a rank; as int32, because every backend carries those."""
    own = numbers.view(torch.int32)
    out = own.new_empty(dist.get_world_size(group) * own.numel())
    all_gather(out, own, group=group)
    return out.view(torch.float64).view(-1, len(numbers)).cpu()

"""One host of a replay: sleeps as long as a step or a round computes, exchanges as many bytes, and takes the time."""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.exchange.courier import begin_gather
from gradwire.tools.race.events import teller
from gradwire.tools.race.replay import Case, Setting
from gradwire.tools.train.worker_group import joined
from gradwire.tools.train.worker_process import run_reporting_errors

WARM = 2  # steps that are not counted: connections open, TCP's windows grow
BACKWARD = 2 / 3  # of a step's time; its buckets are ready one after another


class Player:
    """The buckets of one case, and their exchange."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.gathers, self.seconds = case.collective == "gather", setting.compute_ms / 1e3
        self.parts = case.parts if setting.overlap and case.steps == 1 else [0.0] * len(case.parts)
        self.steps, self.late = case.steps, setting.overlap and case.steps > 1
        dtype = torch.uint8 if self.gathers else getattr(torch, case.dtype)
        self.buckets = [torch.zeros(max(1, n // dtype.itemsize), dtype=dtype) for n in case.buckets]
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.arrived: list[Tensor] = [b.new_empty(setting.hosts * b.numel()) for b in self.buckets if self.gathers]

    def step(self) -> None:
        """The forward, then bucket by bucket the backward and the exchange, in DDP's order.

        Of local steps: all steps of a round, then its exchange, or, late, beside the steps of the next.
        """
        behind = sum(self.parts) * BACKWARD * self.seconds
        if not self.late:
            time.sleep(self.steps * self.seconds - behind)
        works = []
        for number, (bucket, part) in enumerate(zip(self.buckets, self.parts, strict=True)):
            if part:
                time.sleep(part * BACKWARD * self.seconds)
            if self.gathers:
                works.append(begin_gather(self.arrived[number], bucket, self.group))
            else:
                works.append(dist.all_reduce(bucket, async_op=True))
        if self.late:
            time.sleep(self.steps * self.seconds)
        for work in works:
            work.wait()

    def measure(self, steps: int) -> float:
        """The median step, in milliseconds. Every step waits for all hosts, so that host 0's clock is all hosts'."""
        times = []
        for _ in range(WARM + steps):
            begin = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begin)
        return 1e3 * median(times[WARM:]) / self.steps


def main() -> None:
    """`python -m gradwire.tools.race.player SETTINGS FILE`, once a host."""
    settings, path = json.loads(sys.argv[1]), sys.argv[2]
    setting = Setting(**settings["setting"])
    with joined("cpu") as group:
        tell = teller(path, group.rank)
        for number, case in enumerate(settings["cases"]):
            tell({"case": number, "ms_a_step": Player(Case(**case), setting).measure(setting.steps)})


if __name__ == "__main__":
    run_reporting_errors(main)

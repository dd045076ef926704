"""One host of a race: trains until its score reaches the target, on a clock that stops while it is tested."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from gradwire.simulation.random_state import seed_worker
from gradwire.tools.race import race_methods
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.events import Event, Teller, teller
from gradwire.tools.race.race_methods import Method
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import WorkerGroup, joined, own_buffers
from gradwire.tools.train.worker_process import run_reporting_errors

WARM = 4  # steps of a model that is thrown away
MOST_LATE = 100  # steps after which a sum on its way is waited for


class Contestant:
    """One training, and its clock: bytes and seconds are those of the steps, not of the tests between them."""

    def __init__(self, run: RaceRun, plan: TrainingPlan, method: Method, group: WorkerGroup) -> None:
        self.run, self.plan, self.group, self.factor = run, plan, group, method.factor
        torch.manual_seed(plan.settings.seed)
        self.model: nn.Module = plan.task.make_model()
        decay, own = plan.weight_decay, method.momentum
        self.optimizer = optimizers.make(plan.settings.optimizer, self.model.parameters(), 0.0, decay, momentum=own)
        self.entry = method.enter(self.model, self.optimizer)
        self.steps, self.seconds, self.on_link = 0, 0.0, 0
        where = (group.rank, group.world, plan.batch)
        self._indices = sharding.endless(plan.task.samples, plan.settings.seed, *where)
        seed_worker(plan.settings.seed, group.rank)

    def _next(self) -> Tensor:
        """This host's samples of the next step, as `gradwire train` takes them, at the rate of their epoch."""
        epoch, indices = next(self._indices)
        rate = self.plan.schedule.at(epoch, self.group.world) * self.factor
        optimizers.set_learning_rate(self.optimizer, rate)
        return indices

    def train(self, steps: int) -> None:
        """So many steps. All hosts begin and end together, so that the clock of one is the clock of all.

        What is on its way would travel while the clock stands: steps go on until it has come, a round long at most.
        """
        self.group.barrier()
        bytes_before, begin = interface_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step()
        for _ in range(MOST_LATE):
            if self.entry.rests():
                break
            self.step()
        self.entry.wait()
        self.group.barrier()
        self.seconds += time.perf_counter() - begin
        self.on_link += interface_bytes() - bytes_before

    def step(self) -> None:
        inputs, targets = self.plan.task.batch(self._next())
        self.optimizer.zero_grad(set_to_none=True)
        self.plan.task.loss(self.entry.net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.entry.after_step()
        self.steps += 1

    def warm(self) -> None:
        """A model that is thrown away: kernels are compiled and connections are open when the clock starts."""
        self.train(WARM)
        self.entry.warm()
        self.entry.close()

    def score(self) -> float:
        """Of the weights that all hosts share."""
        with own_buffers(self.model), self.entry.shared():
            return self.group.score(self.plan.task, self.model)[self.run.score.name]

    def so_far(self) -> Event:
        """How far it has come."""
        shaped = os.environ.get("GLOO_SOCKET_IFNAME") != "lo"  # there one interface counts for all hosts
        return {
            "seconds": self.seconds,
            "step": self.steps,
            "score": self.score(),
            "bytes_sent": self.entry.sent(self.steps),
            "interface_bytes": self.on_link if shaped else None,
            "waited": self.entry.waited(),
        }

    def race(self, tell: Teller) -> None:
        """To the target or a limit. The score is the same number on all hosts, the clock is host 0's."""
        while True:
            self.train(min(self.run.every, self.run.limit_steps - self.steps))
            so_far = self.so_far()
            reached = self.run.score.reached(so_far["score"], self.run.target)
            late = self.steps >= self.run.limit_steps or self.seconds >= self.run.limit_s
            (over,) = self.group.tell(int(reached or late))
            state = "" if not over else "reached" if reached else "did not reach"
            tell({**so_far, "state": state})
            if over:
                return


def interface_bytes() -> int:
    """What this host's interface has sent since it is there."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text(encoding="utf-8"))


def main() -> None:
    """`python -m gradwire.tools.race.contestant SETTINGS FILE`, once a host."""
    settings, path = json.loads(sys.argv[1]), sys.argv[2]
    run = RaceRun(**settings)
    plan, method = run.plan(), race_methods.parse(run.method)
    with joined("cpu") as group:
        Contestant(run, plan, method, group).warm()
        Contestant(run, plan, method, group).race(teller(path, group.rank))


if __name__ == "__main__":
    run_reporting_errors(main)

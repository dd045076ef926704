"""A host of the benchmarks over shaped links, started once on each: does what the lines on stdin say.

A line is a JSON object, and so is the answer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from benchmarks.models import cifar_vgg
from gradwire.exchange.counting import PHASES
from gradwire.methods import from_spec, to_spec
from gradwire.plan.model import predict
from gradwire.plan.probe import probe
from gradwire.tools.plan.rehearsal import Rehearsal
from gradwire.tools.race.race_methods import ONE_BUCKET, parse
from gradwire.tools.train.settings import Settings
from gradwire.tools.train.task import Schedule
from gradwire.tools.train.worker_group import WorkerGroup

FEWEST, MOST = 6, 60  # steps that are timed, and about so many seconds of them
TIMED_S = 3.0
AUTO_SETTLES = 50  # steps in which auto measures
BLOCKS, BLOCK = 5, 40  # turns, and steps of each: more than auto's clock keeps, so that it has one long one among them


class Noise:
    """A task of random samples, whose classes a network can learn."""

    name = "noise"
    samples = 1 << 14

    def __init__(self, model: str, batch: int) -> None:
        self.model, self.size = model, batch

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "vgg":
            return cifar_vgg()
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        shape = (3, 32, 32) if self.model == "vgg" else (784,)
        inputs = torch.randn(len(indices), *shape, generator=torch.Generator().manual_seed(int(indices[0])))
        return inputs, inputs.flatten(1)[:, :10].argmax(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


class Watch:
    """From the first bucket that is ready to the last future."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0

    def around(self, hook: Any) -> Any:
        def timed(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and takes no text for them
            self.first = self.first or time.perf_counter()
            return hook(state, bucket).then(self.arrived)

        return timed

    def arrived(self, future: Any) -> Any:
        value = future.value()
        self.last = time.perf_counter()
        return value

    def lap_ms(self) -> float:
        took = 1e3 * (self.last - self.first) if self.first else 0.0
        self.first = None
        return took


class Pupil:
    """One model in training."""

    def __init__(self, task: Noise, ddp: DistributedDataParallel, wire: Any) -> None:
        self.task, self.ddp, self.wire, self.number = task, ddp, wire, 0
        self.optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(self) -> float:
        """Milliseconds of one."""
        start, place = time.perf_counter(), self.number * dist.get_world_size() + dist.get_rank()
        inputs, targets = self.task.batch(torch.arange(self.task.size) + self.task.size * place)
        self.learn(inputs, targets)
        self.number += 1
        return 1e3 * (time.perf_counter() - start)

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()

    @property
    def used(self) -> str:
        return "" if self.wire is None else to_spec(self.wire.compressor)


class Host:
    """One rank."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def train(
        self,
        method: str,
        model: str,
        warm: int,
        batch: int,
        steps: int = 0,
        say: bool = False,
        methods: Sequence[str] = (),
        one_bucket: bool = False,
    ) -> dict[str, Any]:
        """Steps with a method: their times, and what was in use and sent.

        steps: so many; say: each as it ends; methods: what auto chooses from.
        """
        task, watch = Noise(model, batch), Watch()
        pupil = Pupil(task, *self._begin(task, method, list(methods), watch, ONE_BUCKET if one_bucket else {}))
        wire = pupil.wire
        times, exchanges, used = [], [], []
        begin = time.perf_counter()
        for number in range(warm + (steps or MOST)):
            if number == warm:
                begin = time.perf_counter()
                if wire is not None:
                    wire.reset_stats()
            times.append(pupil.step())
            exchanges.append(watch.lap_ms())
            used.append(pupil.used)
            if say:
                print(f"step {number}", flush=True)
            enough = number + 1 >= warm + FEWEST and time.perf_counter() - begin > TIMED_S
            if not steps and self._any(enough):
                break
        counted = times[warm:]
        return {
            "step_ms": statistics.median(counted),
            "exchange_ms": statistics.median(exchanges[warm:]),
            "seconds": sum(counted) / 1e3,
            "n_bytes": 0 if wire is None else wire.stats().bytes_sent,
            "ratio": 1.0 if wire is None else wire.stats().ratio,
            "phases": {} if wire is None else {n: getattr(wire.stats(), f"{n}_ms") for n in PHASES},
            "steps": len(counted),
            "times": times,
            "used": used,
        }

    def beside(self, best: str, methods: Sequence[str], batch: int, warm: Sequence[int]) -> dict[str, Any]:
        """Steps of auto and of another method in turns; medians. warm: steps of each before those that count."""
        task = Noise("mlp", batch)
        pupils = [Pupil(task, *self._begin(task, name, list(methods), Watch(), {})) for name in ("auto", best)]
        times: list[list[float]] = [[] for _ in pupils]
        for pupil, count in zip(pupils, warm, strict=True):
            for _ in range(count):
                pupil.step()
        for _ in range(BLOCKS):
            for pupil, took in zip(pupils, times, strict=True):
                took += [pupil.step() for _ in range(BLOCK)][1:]
        auto_ms, best_ms = map(statistics.median, times)
        return {"auto": auto_ms, "best": best_ms, "used": pupils[0].used}

    def compare(self, rounds: int, batch: int) -> dict[str, Any]:
        """Steps of plain DDP, of the same once more and of auto, taking turns; medians."""
        task, times = Noise("mlp", batch), dict[str, list[float]](plain=[], control=[], auto=[])
        models = {name: DistributedDataParallel(task.make_model()) for name in times}
        wire = gradwire.attach(models["auto"], "auto")
        pupils = {name: Pupil(task, model, None) for name, model in models.items()}
        for number in range(rounds):
            inputs, targets = task.batch(torch.arange(batch) + number * batch)
            for name, pupil in pupils.items():  # always in this order: auto is to see steps of one length
                start = time.perf_counter()
                pupil.learn(inputs, targets)
                times[name].append(1e3 * (time.perf_counter() - start))
        swapped = any("forward" in module.__dict__ for module in models["auto"].module.modules())
        settled = {name: took[AUTO_SETTLES:] for name, took in times.items()}
        found: dict[str, Any] = {name: statistics.median(took) for name, took in settled.items()}
        means = {f"{name} mean": statistics.fmean(took) for name, took in settled.items()}
        return found | means | {"method": to_spec(wire.compressor), "swapped": swapped, "steps": rounds - AUTO_SETTLES}

    def _begin(
        self, task: Noise, method: str, methods: list[str], watch: Watch, buckets: dict[str, Any]
    ) -> tuple[DistributedDataParallel, Any]:
        race = parse(method) if method.startswith("torch:") else None
        ddp = DistributedDataParallel(task.make_model(), **(buckets if race is None else race.buckets | buckets))
        register = ddp.register_comm_hook
        ddp.register_comm_hook = lambda state, hook: register(state, watch.around(hook))  # type: ignore[method-assign]
        if method == "torch:allreduce":
            ddp.register_comm_hook(None, allreduce_hook)  # what DDP does without one, and its times can be seen
        elif race is not None:
            race.begin(ddp)
        elif method == "auto":
            return ddp, gradwire.attach(ddp, "auto", methods=methods)
        else:
            return ddp, gradwire.attach(ddp, from_spec(method))
        return ddp, None

    def predict(self, methods: list[str], batch: int) -> dict[str, float]:
        """Milliseconds of a step, by all that `gradwire plan` measures: a rehearsal, and the link as it is now."""
        names = {"settings": Settings(optimizer="sgd"), "weight_decay": 0.0, "schedule": Schedule(0.01), "batch": batch}
        plan: Any = SimpleNamespace(task=Noise("mlp", batch), **names)
        group = WorkerGroup(self.rank, dist.get_world_size(), torch.device("cpu"))
        assert dist.group.WORLD is not None
        network = probe(dist.group.WORLD, torch.device("cpu"))
        named = [(spec, from_spec(spec)) for spec in methods]
        work, costs = Rehearsal(plan, group, lambda *_: None).rehearse(named, network)
        return {cost.spec: predict(work, network, cost).step_ms for cost in costs} | {"mbit": network.mbit}

    def _any(self, fact: bool) -> bool:
        told = torch.tensor([float(fact)])
        dist.all_reduce(told)
        return bool(told)


def main() -> None:
    host = Host()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(host, order.pop("do"))(**order)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

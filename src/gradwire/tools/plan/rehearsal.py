"""Some steps of a real training without any exchange: their times, DDP's buckets, and every method on their gradients.

1. Plain steps: forward, backward, after. DDP hands every bucket to a hook that gives it back at once.
2. Recorded steps, if a method needs second moments: what they cost, and gradients with real moments. After each step
   methods encode and decode its gradients (costs.py), bucket by bucket: at first those whose messages follow what they
   hold back, until they have settled, then all.
3. Laps: a whole step of one method, from one barrier to the next, with its collectives, but for what is more than 256
   KB of one. Workers that share cores, or of which one is late, take longer together than each by itself, and wait for
   each other whenever they meet; the times of 1 and 2 are scaled to what a lap takes.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real classes.
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.exchange.courier import begin_gather
from gradwire.layout import Layout
from gradwire.local_steps.recipe import Recipe
from gradwire.methods import Compressor
from gradwire.moments import Recorder
from gradwire.plan.choose import choose
from gradwire.plan.costs import Dry, usual
from gradwire.plan.crowding import crowded
from gradwire.plan.model import FLOAT_BYTES, Cost, Network, Work
from gradwire.plan.probe import probe
from gradwire.tools.plan.local_rehearsal import LocalDry
from gradwire.tools.plan.report import PlanReport
from gradwire.tools.progress import Bars
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import WorkerGroup, joined

WARM = 3  # steps: DDP has its final buckets from the second on
PLAIN_STEPS, PLAIN_S = 20, 5.0
SETTLE_STEPS, SETTLE_S = 60, 10.0  # what VGC sends comes to rest slowly
DRY_STEPS, DRY_S = 15, 6.0
LAPS, LAPS_S = 50, 3.0  # of each method
MET_BYTES = 1 << 18  # at most, of a message in a lap: more would only be longer on the link
PLAIN = ""  # in the place of a method: none
LOOK = 5  # steps between two looks at the clock, which all workers take together
Progress = Callable[[str, int, int], None]  # (what, step, of so many)


@dataclass
class Moment:
    """One step as it went, in ms."""

    forward: float = 0.0
    backward: float = 0.0
    after: float = 0.0
    ready: tuple[float, ...] = ()  # since the backward began


class Rehearsal:
    """One worker's model, data and clock."""

    def __init__(self, plan: TrainingPlan, group: WorkerGroup, progress: Progress) -> None:
        self.plan, self.group, self.progress = plan, group, progress
        torch.manual_seed(plan.settings.seed)
        model = plan.task.make_model().to(group.device)
        self.ddp = group.wrap(model)
        self.names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        rate = plan.schedule.at(0, group.world)
        self.optimizer = optimizers.make(plan.settings.optimizer, model.parameters(), rate, plan.weight_decay)
        self.recorder: Recorder | None = None
        self.number = 0
        self.layouts: list[Layout] = []
        self.buffers: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.ready: list[float] = []
        self.pool = ThreadPoolExecutor(1)  # in the courier's place
        where = (group.rank, group.world, plan.batch)
        self.samples = sharding.endless(plan.task.samples, plan.settings.seed, *where)
        self.ddp.register_comm_hook(self, take)

    def step(self) -> Moment:
        """One step of the training of this worker alone."""
        self.layouts, self.buffers, self.ready = [], [], []
        if self.recorder is not None:
            self.recorder.passes.begin_step(self.number)
        self.number += 1
        begin = self._now()
        _, indices = next(self.samples)
        inputs, targets = (tensor.to(self.group.device) for tensor in self.plan.task.batch(indices))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.plan.task.loss(self.ddp(inputs), targets)
        forward = self._now()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = self._now()
        self.optimizer.step()
        after = self._now()
        ready = tuple(at - forward for at in self.ready)
        return Moment(forward - begin, backward - forward, after - backward, ready)

    def several(self, what: str, most: int, most_s: float, each: Callable[[], None] = lambda: None) -> list[Moment]:
        """Steps after some to warm up, until there are enough or a worker has had its time."""
        moments = []
        self.group.barrier()
        begin = time.perf_counter()
        for number in range(WARM + most):
            moments.append(self.step())
            each()
            self.progress(what, number + 1, WARM + most)
            if number > WARM and number % LOOK == 0:
                late = torch.tensor([float(time.perf_counter() - begin > most_s)], device=self.group.device)
                if bool(self.group.sum(late) > 0):
                    break
        return moments[WARM:]

    def rehearse(self, methods: Sequence[tuple[str, Compressor | Recipe]], network: Network) -> tuple[Work, list[Cost]]:
        """All that is measured; the same on every worker. network: the link as it is now."""
        plain = self.several("plain steps", PLAIN_STEPS, PLAIN_S)
        work = self._work(plain)
        self.moments = [torch.ones(layout.numel, device=self.group.device) for layout in self.layouts]
        dry = {spec: self._dry(method) for spec, method in methods}
        noisy = {spec for spec, one in dry.items() if one.compressor.needs_moments}
        if noisy:
            self._record()
        settling = [one for one in dry.values() if one.compressor.needs_room]
        if settling:
            self.several("settling", SETTLE_STEPS, SETTLE_S, lambda: self._send(settling, lean=True))
        recorded = self.several("dry run", DRY_STEPS, DRY_S, lambda: self._send(list(dry.values())))
        factor = max(1.0, self._slowest(recorded) / self._slowest(plain)) if self.recorder is not None else 1.0
        costs = {}
        for spec, one in dry.items():
            moments = factor if spec in noisy else 1.0
            costs[spec] = replace(self._agreed(one.cost(len(recorded))), spec=spec, moments=moments)
        for spec, one in dry.items():
            one.largest, one.meet = list, partial(self._meet, costs[spec])
            one.gather = partial(self._gather, costs[spec])
        laps = self._medians({spec: partial(self._lap, dry[spec]) for spec in dry if spec in noisy})
        if self.recorder is not None:
            self.recorder.remove()
            self.recorder = None
        others = {spec: partial(self._lap, dry[spec]) for spec in dry if spec not in noisy}
        laps |= self._medians({PLAIN: partial(self._lap, None), **others})
        meetings = {spec: self._meetings_ms(costs[spec], dry[spec].layouts, network) for spec in costs}
        return crowded(work, costs, self.group.world, laps, laps[PLAIN], meetings)

    def _dry(self, method: Compressor | Recipe) -> Dry:
        """A method on DDP's buckets, local steps on fragments of the weights."""
        world, device = self.group.world, self.group.device
        if isinstance(method, Recipe):
            return LocalDry(method, self.parameters, world, device, self._largest)
        return Dry(method, self.layouts, world, device, self._largest)

    def _record(self) -> None:
        """As a link does: moments go to flat tensors, bucket by bucket."""
        self.recorder = Recorder(self.ddp, self.parameters)
        for layout, moment in zip(self.layouts, self.moments, strict=True):
            for slot in layout:
                self.recorder.bind(slot.name, slot.of(moment))

    def _send(self, methods: Sequence[Dry], lean: bool = False) -> None:
        """This step's gradients through every method."""
        for method in methods:
            if isinstance(method, LocalDry):
                method.look()
            method.step([buffer.clone() for buffer in self.buffers] if lean else self.buffers, self.moments, lean)

    def _medians(self, timed: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        """The usual of each, of the slowest worker; they take turns, so that what disturbs one disturbs all."""
        took: dict[str, list[float]] = {spec: [] for spec in timed}
        begin = time.perf_counter()
        for number in range(1 + LAPS if timed else 0):
            for spec, once in timed.items():
                took[spec].append(once())
            self.progress("laps", number + 1, 1 + LAPS)
            late = number > WARM and time.perf_counter() - begin > LAPS_S * len(timed)
            if self.group.tell(int(late))[0]:  # rank 0 says it for all
                break
        own = torch.tensor([statistics.median(times[1:]) for times in took.values()], dtype=torch.float64)
        slowest = self.group.gather(own).amax(0).tolist() if timed else []
        return dict(zip(timed, slowest, strict=True))

    def _lap(self, method: Dry | None) -> float:
        """From barrier to barrier, a step with this method's encode and decode in a thread; None: without."""
        self.group.barrier()
        begin = self._now()
        self.step()
        if method is not None and method.compressor.kind == "sum":
            method.step(self.buffers, self.moments, lean=True)
        elif method is not None:
            self.pool.submit(method.step, self.buffers, self.moments, lean=True).result()
        self.group.barrier()
        return self._now() - begin

    def _meetings_ms(self, cost: Cost, layouts: Sequence[Layout], network: Network) -> float:
        """The collectives of a lap, as the model has them."""
        if cost.kind == "sum":
            return 0.0
        gather = cost.kind == "gather"
        each = (min(cost.handed_over(layout.numel) / cost.rounds, MET_BYTES) for layout in layouts)
        return sum(cost.rounds * network.collective_ms(network.on_link(n_bytes, gather), gather) for n_bytes in each)

    def _gather(self, cost: Cost, message: Tensor) -> Tensor | None:
        """The messages of all workers; too long ones are not sent, only as much as is enough to meet."""
        if message.nbytes > MET_BYTES:
            self._meet(cost, round(MET_BYTES / cost.bytes_per_element))
            return None
        assert dist.group.WORLD is not None
        out = message.new_empty(self.group.world * len(message))
        begin_gather(out, message, dist.group.WORLD).wait()
        return out.view(self.group.world, -1)

    def _meet(self, cost: Cost, numel: int) -> None:
        """In the place of a collective: one of about as many bytes, of nothing."""
        if cost.kind == "sum":
            return
        assert dist.group.WORLD is not None
        n_bytes = min(cost.handed_over(numel) / cost.rounds, MET_BYTES)
        own = torch.zeros(max(self.group.world, round(n_bytes / FLOAT_BYTES)), device=self.group.device)
        if cost.kind == "rounds":
            dist.all_reduce(own)
        else:
            begin_gather(own.new_empty(self.group.world * len(own)), own, dist.group.WORLD).wait()

    def _work(self, moments: Sequence[Moment]) -> Work:
        """Of the worker that the others wait for."""
        names = ("forward", "backward", "after")
        own = [usual(getattr(one, name) for one in moments) for name in names]
        kept = [one for one in moments if len(one.ready) == len(self.layouts)]
        shares = [
            min(1.0, statistics.median(one.ready[number] / one.backward for one in kept))
            for number in range(len(self.layouts))
        ]
        rows = self.group.gather(torch.tensor([*own, *shares], dtype=torch.float64)).tolist()
        forward, backward, after, *ready = max(rows, key=lambda row: sum(row[:3]))
        beside = 1.0 if self.group.device.type == "cuda" else 0.0  # on a CPU the courier needs the backward's cores
        buckets = tuple(layout.numel for layout in self.layouts)
        return Work(buckets, forward, backward, after, tuple(ready), beside)

    def _slowest(self, moments: Sequence[Moment]) -> float:
        """Forward + backward in ms."""
        own = usual(one.forward + one.backward for one in moments)
        return float(self.group.gather(torch.tensor([own], dtype=torch.float64)).max())

    def _largest(self, counts: list[int]) -> list[int]:
        """Of all workers; so the messages are as long as in a training."""
        return [int(count) for count in self.group.gather(torch.tensor(counts)).amax(0).tolist()]

    def _agreed(self, cost: Cost) -> Cost:
        """The median of all workers, number by number."""
        names = ("bytes_per_element", "encode_ns", "decode_ns", "decode_message_ns", "overhead_ms")
        found: Cost = replace(cost, **self._medians_of({name: getattr(cost, name) for name in names}))
        if cost.local is None:
            return found
        own = self._medians_of({"begin_ns": cost.local.begin_ns, "end_ns": cost.local.end_ns})
        return replace(found, local=replace(cost.local, **own))

    def _medians_of(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        rows = self.group.gather(torch.tensor(list(numbers.values()), dtype=torch.float64))
        columns = rows.T.tolist()
        return {name: statistics.median(column) for name, column in zip(numbers, columns, strict=True)}

    def _now(self) -> float:
        self.group.synchronize()
        return 1e3 * time.perf_counter()


def take(rehearsal: Rehearsal, bucket: GradBucket) -> Future[Tensor]:
    """DDP's hook: notes when the bucket came and what is in it, and sends nothing."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    layout = Layout.of((rehearsal.names[id(parameter)], parameter.shape) for parameter in parameters)
    if rehearsal.recorder is not None:
        for slot in layout:
            rehearsal.recorder.consume(slot.name, slot.of(buffer))
    rehearsal.ready.append(1e3 * time.perf_counter())
    rehearsal.layouts.append(layout)
    rehearsal.buffers.append(buffer.detach().float())  # DDP leaves it as it is until the next backward
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type == "cuda" else [])
    done.set_result(buffer)
    return done


def measured(
    plan: TrainingPlan,
    methods: Mapping[str, Compressor | Recipe],
    margin: float,
    show: Callable[[PlanReport], None],
) -> None:
    """Join the others, measure the link and rehearse, and show what follows from it on rank 0: all come to the same."""
    with joined(plan.settings.device) as group:
        with Bars(hidden=not group.leads, stderr=True, transient=True) as bars:
            tasks = {name: bars.begin(name, None) for name in ("link", "plain steps", "settling", "dry run", "laps")}
            assert dist.group.WORLD is not None
            network = probe(dist.group.WORLD, group.device)
            bars.update(tasks["link"], completed=1, total=1)
            rehearsal = Rehearsal(plan, group, lambda what, n, of: bars.update(tasks[what], completed=n, total=of))
            work, costs = rehearsal.rehearse(list(methods.items()), network)
        if group.leads:
            title = f"{plan.task.name} on {group.device.type}"
            show(PlanReport(title, work, network, costs, choose(work, network, costs, margin)))
        group.barrier()

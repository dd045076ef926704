"""Local steps of one worker among others: counts its optimizer's steps, and carries out a round where one is due."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.adapters.local_weights import FlatView, trained, unwrapped
from gradwire.codec.header import VERSION
from gradwire.errors import AttachError, GradwireError
from gradwire.exchange.counting import Meter
from gradwire.exchange.courier import Courier, Flight, agree, courier_of, device_of
from gradwire.exchange.pipeline import Backward, Bucket, Job, Pipeline, recorded_event
from gradwire.exchange.room import Capacity, RoomPlan
from gradwire.local_steps.batch_statistics import statistics_of
from gradwire.local_steps.error_feedback import method_of
from gradwire.local_steps.forgetting import forget_what_broke
from gradwire.local_steps.fragments import fragments_of, sent_after
from gradwire.local_steps.outer_step import decay, merged, outer_step
from gradwire.local_steps.recipe import Recipe
from gradwire.version import __version__

ALONE = (
    "rank {rank} waited for the others in round {round}, and they did not come ({error}). All workers must take the "
    "same number of optimizer steps; where a GradScaler may leave one out on one worker alone, call wire.finish() on "
    "all of them at the end of training"
)
WENT_WRONG = (
    "gradwire: the weights of rank {rank} are not finite after inner step {step}. It contributes nothing to this round "
    "and starts the next one from the base weights"
)


@dataclass
class RoundOutcome:
    """What a round brought, the same on every worker."""

    mean: Tensor  # [N]: u
    good: int  # workers that contributed
    finishing: int  # workers that are in `finish`
    statistics: Tensor | None  # the mean of the workers' buffers, where they go along and one has finite ones


@dataclass
class Round:
    """One exchange of a fragment that has not been applied yet."""

    number: int
    due: int  # the inner step after which it is applied
    sent_from: Tensor | None  # the weights as the delta was taken; None where it is applied at once
    buffers_then: Tensor | None = None  # as they were sent; None where they do not go along
    mean: Future[Tensor] | None = None
    summed: Promise[Flight] | None = None
    outcome: RoundOutcome | None = None  # once it was waited for


@dataclass
class Fragment:
    """Layers that are exchanged together."""

    weights: FlatView
    base: Tensor  # [N]
    momentum: Tensor | None
    bucket: Bucket
    capacity: Capacity
    pipeline: Pipeline
    last: bool  # buffers go with it
    flight: Round | None = None


@dataclass
class Tally:
    """Figures that the meter does not have."""

    inner: int = 0
    rounds: int = 0
    waited: float = 0.0  # seconds that the training stood still for the exchange
    lost: int = 0  # rounds to which this worker contributed nothing


class OuterLoop:
    """What stands between a model's optimizer and the other workers."""

    def __init__(
        self,
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        recipe: Recipe,
        group: dist.ProcessGroup,
    ) -> None:
        self.net, self.optimizers, self.recipe, self.group = unwrapped(net), list(optimizers), recipe, group
        self.parameters = trained(self.net)
        self._check_optimizers()
        self.method = method_of(recipe, recipe.fragments)
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.device = next(iter(self.parameters.values())).device
        self.n_parameters = sum(part.numel for part in FlatView(self.parameters).layout)
        self.meter, self.tally = Meter(self.n_parameters), Tally()
        self.inner = self.exchanges = 0
        self.on_round: list[Callable[[], None]] = []
        agree(group, self._facts(), self.device)
        self.courier: Courier = courier_of(group)
        self._begin_alike()
        self.buffers = FlatView(statistics_of(self.net) if recipe.buffers == "average" else {})
        self.buffers_base = self.buffers.read()
        parts = fragments_of({name: p.numel() for name, p in self.parameters.items()}, recipe.fragments)
        self.fragments = [self._fragment(names, number == len(parts) - 1) for number, names in enumerate(parts)]
        last = self.optimizers[-1]
        self._step_frame: FrameType | None = None
        self._handles = [last.register_step_pre_hook(self._before_step), last.register_step_post_hook(self._after_step)]
        self.attached = True

    # ---- how it begins

    def _check_optimizers(self) -> None:
        theirs = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        if missing := [name for name, parameter in self.parameters.items() if id(parameter) not in theirs]:
            raise AttachError(
                f"no optimizer has {missing[0]} ({len(missing)} of {len(self.parameters)} parameters that are "
                "trained): give local() all optimizers of this model, [first, second], or freeze what is not trained"
            )

    def _facts(self) -> dict[str, str]:
        tensors = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items())
        return {
            "gradwire version": f"{__version__}, message version {VERSION}",
            "recipe of local steps": repr(self.recipe),
            "model": f"{self.n_parameters} parameters in {len(self.parameters)} tensors\n{tensors}",
        }

    def _begin_alike(self) -> None:
        """All workers hold the weights and buffers of the first, as DDP has it."""
        for tensors in (self.parameters, statistics_of(self.net)):
            view = FlatView(tensors)
            flat = view.read().to(device_of(self.group, self.device))
            dist.broadcast(flat, group=self.group, group_src=0)
            view.write(flat.to(self.device))

    def _fragment(self, names: Sequence[str], last: bool) -> Fragment:
        weights = FlatView({name: self.parameters[name] for name in names})
        layout, base = weights.layout, weights.read()
        numels = {slot.name: slot.numel for slot in layout}
        capacity = Capacity(base.nbytes, self.world_size, numels)
        bucket = Bucket(layout, self.method.init(layout, self.device), base.new_empty(0))
        pipeline = Pipeline(self.courier, self.meter, capacity, lambda finite: None)
        momentum = torch.zeros_like(base) if self.recipe.outer_momentum else None
        if (most := self.method.most_bytes) is not None and most < (least := capacity.least(self.method.words)):
            raise AttachError(
                f"max_bytes_per_step={self.recipe.compressor.most_bytes} allows a fragment {most} bytes a round, and "
                f"the heads of its messages and one element of each of its {len(layout)} tensors are {least}"
            )
        return Fragment(weights, base, momentum, bucket, capacity, pipeline, last)

    # ---- one inner step

    def _before_step(self, *_: object) -> None:
        """Remembers the outermost: of a class whose `step` calls that of its base torch calls the hooks twice."""
        caller = sys._getframe(1)
        if self._step_frame is None or self._step_frame not in callers(caller):  # an error may have ended it
            self._step_frame = caller

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if sys._getframe(1) is not self._step_frame:
            return
        self._step_frame = None
        skipped = getattr(optimizer, "found_inf", None)  # of a GradScaler, where the optimizer itself leaves a step out
        if skipped is not None and bool(skipped):
            return
        self.inner += 1
        self.tally.inner += 1
        with torch.no_grad():
            for fragment in self.fragments:
                if fragment.flight is not None and fragment.flight.due <= self.inner:
                    self._end_round(fragment)
            # in turn: whose turn it is follows from the exchanges, the same on all workers, not from this one's steps
            begun = [self._next() for _ in sent_after(self.inner, self.recipe.every, len(self.fragments))]
            if self.recipe.delay == 0:
                for fragment in begun:
                    self._end_round(fragment)

    def finish(self) -> None:
        """A last round of what every fragment has, as soon as all workers are here; then all hold the base weights."""
        with torch.no_grad():
            for fragment in self.fragments:
                if fragment.flight is not None:
                    self._end_round(fragment)
            together = 0
            while together < len(self.fragments):
                outcome = self._end_round(self._next(finishing=True))
                together = together + 1 if outcome.finishing == self.world_size else 0

    # ---- one round

    def _next(self, finishing: bool = False) -> Fragment:
        """The round of the fragment whose turn it is begins."""
        fragment = self.fragments[self.exchanges % len(self.fragments)]
        self._begin_round(fragment, finishing)
        self.exchanges += 1
        return fragment

    def _begin_round(self, fragment: Fragment, finishing: bool) -> None:
        """What the worker has done since the last round goes on its way."""
        weights = fragment.weights.read()
        delta = fragment.weights.rounded(fragment.base) - weights
        good = bool(torch.isfinite(delta.sum()))
        active = None
        if good:
            for residual in self._residuals(fragment):
                decay(self.recipe, residual)
        else:
            self._start_over()
            weights, active = fragment.weights.read(), torch.zeros(len(fragment.weights.layout), dtype=torch.bool)
            delta.zero_()
        late = self.recipe.delay > 0 and not finishing
        fragment.flight = Round(self.exchanges, self.inner + self.recipe.delay, weights if late else None)
        fragment.flight.mean = self._submit(fragment, delta, active)
        fragment.flight.summed = self._sum_status(fragment, good, finishing)

    def _submit(self, fragment: Fragment, delta: Tensor, active: Tensor | None) -> Future[Tensor]:
        plan, method = RoomPlan(dense=self.method.kind == "sum"), self.method
        if method.needs_room:
            plan = fragment.capacity.plan(method.words, method.most_bytes, method.share)
        number = self.exchanges // len(self.fragments)  # of this fragment, as they take turns
        step = Backward(number, plan, tensors_left=len(fragment.weights.layout))
        job = Job(
            bucket=fragment.bucket,
            buffer=delta,
            active=None if active is None else active.to(self.device),
            scale=None,
            ready=recorded_event(self.device),
            future=Future(devices=[self.device] if self.device.type == "cuda" else []),
        )
        fragment.pipeline.submit(method, step, job)
        return job.future

    def _sum_status(self, fragment: Fragment, good: bool, finishing: bool) -> Promise[Flight]:
        """Who contributes, who finishes, and with the last fragment the buffers, of those who have finite ones."""
        device, then, fine = device_of(self.group, self.device), torch.zeros(0), True
        assert fragment.flight is not None
        if fragment.last and len(self.buffers.layout):
            then = fragment.flight.buffers_then = self.buffers.read()
            fine = bool(torch.isfinite(then.sum()))
        heads = torch.tensor([float(good), float(finishing), float(fine)], device=device)
        vector = torch.cat([heads, (then if fine else torch.zeros_like(then)).to(device)])
        ready, promise = recorded_event(vector.device), Promise[Flight]()
        self.meter.count(vector.nbytes, vector.nbytes, 0)

        def send() -> None:
            try:
                if ready is not None:
                    torch.cuda.current_stream(vector.device).wait_event(ready)
                promise.set_result(self.courier.sum(vector))
            except BaseException as error:
                promise.set_exception(error)

        self.courier.submit(send)
        return promise

    def _end_round(self, fragment: Fragment) -> RoundOutcome:
        """What came of it: the base weights step, and the worker goes on from them."""
        flight, outcome = fragment.flight, self.arrived(fragment)
        assert flight is not None
        fragment.flight = None
        if outcome.good and bool(torch.isfinite(outcome.mean.sum())):
            outer_step(self.recipe, fragment.base, outcome.mean, fragment.momentum)
        if flight.sent_from is None:
            fragment.weights.write(fragment.base)
        else:
            fragment.weights.write(merged(self.recipe, fragment.base, fragment.weights.read(), flight.sent_from))
        if outcome.statistics is not None and flight.buffers_then is not None:
            self._merge_buffers(outcome.statistics, flight.buffers_then, late=flight.sent_from is not None)
        self.tally.rounds += fragment.last
        if fragment.last:
            for action in self.on_round:
                action()
        return outcome

    def arrived(self, fragment: Fragment) -> RoundOutcome:
        """Waits for the round that is on its way."""
        flight = fragment.flight
        assert flight is not None
        if flight.outcome is None:
            assert flight.mean is not None
            assert flight.summed is not None
            begin = time.perf_counter()
            try:
                mean, status = flight.mean.wait(), flight.summed.result().wait()
            except GradwireError:
                raise
            except RuntimeError as error:
                raise GradwireError(ALONE.format(rank=self.rank, round=flight.number, error=error)) from error
            self.tally.waited += time.perf_counter() - begin
            status = status.view(-1).to(self.device)
            good, finishing, fine = (round(number) for number in status[:3].tolist())
            statistics = status[3:] / fine if fine and flight.buffers_then is not None else None
            flight.outcome = RoundOutcome(mean, good, finishing, statistics)
        return flight.outcome

    def _merge_buffers(self, mean: Tensor, then: Tensor, late: bool) -> None:
        """The mean over the workers, after a delay with what they have become meanwhile, where that is a number."""
        since = self.buffers.read() - then if late else torch.zeros_like(mean)
        self.buffers_base = mean + torch.where(torch.isfinite(since), since, 0.0)
        self.buffers.write(self.buffers_base)

    def _start_over(self) -> None:
        """The weights are lost: the worker goes on from the base, with an optimizer that forgets what broke."""
        warnings.warn(WENT_WRONG.format(rank=self.rank, step=self.inner), stacklevel=5)
        self.tally.lost += 1
        for fragment in self.fragments:
            fragment.weights.write(fragment.base)
            if fragment.flight is not None and fragment.flight.sent_from is not None:
                fragment.flight.sent_from = fragment.weights.read()
        self.buffers.write(self.buffers_base)
        forget_what_broke(self.optimizers)

    def _residuals(self, fragment: Fragment) -> list[Tensor]:
        residual = getattr(fragment.bucket.state, "residual", None)
        return [] if residual is None else [residual]

    def reset_totals(self) -> None:
        self.meter.reset()
        self.tally = Tally()

    def residuals(self) -> list[Tensor]:
        """What is held back, fragment by fragment."""
        return [residual for fragment in self.fragments for residual in self._residuals(fragment)]

    def detach(self) -> None:
        """No more rounds."""
        for handle in self._handles:
            handle.remove()
        self.attached = False


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """This one, who called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back

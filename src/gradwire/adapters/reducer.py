"""The reducer of one model: its buckets go in as gradients and come back as the mean over the ranks. Steps 2 to 6."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradwire.adapters import momentum_advice, optimizer_hook
from gradwire.adapters.unused_parameters import UnusedParameters
from gradwire.codec.header import VERSION
from gradwire.errors import SECOND_BACKWARD, WRAPPED_ANEW, GradwireError
from gradwire.exchange.budget import Budget, check
from gradwire.exchange.counting import Meter
from gradwire.exchange.courier import agree, courier_of
from gradwire.exchange.pipeline import Backward, Job, Pipeline, recorded_event
from gradwire.exchange.room import Capacity, RoomPlan
from gradwire.exchange.step import Part
from gradwire.exchange.sums import summed
from gradwire.layout import Layout
from gradwire.methods.base import Compressor, Context, Sum
from gradwire.methods.dense import Dense
from gradwire.state.by_name import Store
from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire.adapters.auto.step_clock import Clock
    from gradwire.moments import Recorder


class Reducer:
    """What stands between one model and its process group: `exchange` takes every bucket that is ready.

    root: the module whose forward is called; parameters: those that are exchanged, by name.
    """

    def __init__(
        self,
        root: nn.Module,
        group: dist.ProcessGroup,
        parameters: dict[str, nn.Parameter],
        scaler: Any,
        moments: dict[str, Any],
    ) -> None:
        self._root = weakref.ref(root)  # DDP's own holds this one: the other way round it would never be freed
        self.scaler, self._moments = scaler, moments
        self.group, self.parameters = group, parameters
        self.world_size = dist.get_world_size(self.group)
        self.n_parameters = sum(p.numel() for p in self.parameters.values())
        self.device = next(iter(self.parameters.values())).device
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._strides = {name: parameter.stride() for name, parameter in self.parameters.items()}
        self._compressor: Compressor = Dense()  # one that nobody could set up is plain DDP
        self._next: Compressor | None = None  # takes over after one dense step, which takes what is held back along
        self.recorder: Recorder | None = None
        self.unused = UnusedParameters(getattr(root, "find_unused_parameters", False))
        self.store = Store(self._bind)
        self.meter = Meter(self.n_parameters)
        self.capacity = Capacity.of_model(root, self.parameters, self.world_size)
        self.budget = Budget(self.world_size)
        self.steps = 0
        self.attached, self.over = True, False
        self.on_step: list[Callable[[], None]] = []
        self.clock: Clock | None = None  # is told when buckets are ready and back
        self.between_steps: Callable[[], None] | None = None  # called after the optimizer's step, before a forward
        self._advised: Compressor | None = None
        self._pipeline: Pipeline | None = None
        self._step = Backward(0, RoomPlan(dense=True), done=True)
        self._last_scale: Tensor | None = None
        self._updates: int | None = None  # the parameters' versions when the last exchange began
        self._layouts: dict[tuple[int, ...], Layout] = {}
        optimizer_hook.listen(self)

    @property
    def compressor(self) -> Compressor:
        """The one that was asked for last."""
        return self._next or self._compressor

    def use(self, compressor: Compressor) -> None:
        """Makes `compressor` the one in use. Collective: all ranks compare before anything is sent."""
        agree(self.group, self._facts(compressor), self.device)
        check(compressor, self.capacity)  # all ranks alike, so that none of them waits for one that was refused
        waits = not compressor.holds_back and self._compressor.holds_back and bool(self.store.residuals())
        working = self._compressor if waits else compressor  # in the step that comes
        recorder, pipeline = self.recorder, self._pipeline
        if working.needs_moments and recorder is None:
            recorder = self._record()
        if working.kind != "sum" and pipeline is None:
            pipeline = Pipeline(courier_of(self.group), self.meter, self.capacity, self._end_step)
        self.recorder, self._pipeline = recorder, pipeline  # nothing can fail from here on
        if waits:
            self._next = compressor
        else:
            self._install(compressor)

    @property
    def root(self) -> nn.Module:
        """The module whose forward is called."""
        root = self._root()
        assert root is not None  # who asks for it holds it
        return root

    def _record(self) -> Recorder:
        from gradwire.moments import Recorder  # what nobody else needs is not imported with gradwire

        recorder = Recorder(self.root, self.parameters, **self._moments)
        recorder.passes.begin_step(self.steps)
        return recorder

    def _install(self, compressor: Compressor) -> None:
        self._compressor, self._next = compressor, None
        self.budget.use(compressor, self.capacity)
        if not compressor.needs_moments:
            self._stop_recording()
        if not compressor.holds_back:
            self.store.prune()
        if not compressor.needs_room:
            self.capacity.passed.clear()
        self.unused.watch(self.parameters if compressor.holds_back and self.recorder is None else {})
        self.store.set(dict(self.store.items()), self.store.powers)  # the next bucket is laid out for this compressor

    def close(self) -> None:
        """After an attach that failed: forwards and hooks as they were."""
        self.attached = False
        if self._next is None and self._compressor.kind == "sum":
            self._stop_recording()

    def _stop_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.remove()
            self.recorder = None

    def detach(self) -> None:
        """Plain DDP; what is held back goes out with the next gradient. Collective."""
        self.use(Dense())
        self.on_step.clear()
        self.attached = False

    def reopen(self, scaler: Any, moments: dict[str, Any]) -> None:
        """Attached again, with other options; what is still held back stays here."""
        self.attached, self.scaler, self._moments = True, scaler, moments
        self.meter.reset()
        if self.recorder is not None:
            self.recorder.remove()
            self.recorder = self._record()

    def take_over(self, older: Reducer) -> None:
        """Goes on where that of an earlier wrapping of the same net stands, which is over from now on.

        What it holds back comes along where the parameter is the same and has its elements in the same order.
        """
        older.end()
        if older.group is not self.group:
            if older.store.residuals():
                warnings.warn(
                    "gradwire: this net was attached before, in another process group: what was held back there is "
                    "dropped, since the workers may be others",
                    stacklevel=4,
                )
            return
        same = {n for n, p in self.parameters.items() if older.parameters.get(n) is p}
        same = {name for name in same if older._strides[name] == self._strides[name]}
        self.store.set({n: fields for n, fields in older.store.items() if n in same}, dict(older.store.powers))
        self.capacity.passed = {n: count for n, count in older.capacity.passed.items() if n in same}
        self.capacity.since_dense = older.capacity.since_dense
        self.steps = older.steps
        self._install(older._compressor)
        self.budget.restore(older.budget.step_ns)

    def end(self) -> None:
        """Another one has the net: the modules are as they were, and the model around them trains no more."""
        if self.over:
            return
        self.attached, self.over = False, True
        self.on_step.clear()
        self.clock = self.between_steps = None
        root = self._root()
        if root is not None:
            root.register_forward_pre_hook(_refuse)  # a backward that raises would leave DDP's reducer in the middle
        self._stop_recording()
        self.unused.watch({})
        if self._pipeline is not None and not self._step.done:
            self._pipeline.abandon(self._step)

    def _facts(self, compressor: Compressor) -> dict[str, str]:
        tensors = "\n".join(f"{name} {tuple(p.shape)} {p.stride()} {p.dtype}" for name, p in self.parameters.items())
        return {
            "gradwire version": f"{__version__}, message version {VERSION}",
            "compressor": repr(compressor),
            "model": f"{self.n_parameters} parameters in {len(self.parameters)} tensors\n{tensors}",
            "options of attach": f"{self._moments}, scaler={self.scaler is not None}",
            "history": f"step {self.steps}\n{self.capacity.passed} {self.capacity.since_dense} {self.budget.step_ns}",
        }

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """One ready bucket: its future holds the mean over the ranks."""
        if self._step.done:
            self._begin_step()
        layout, buffer = self._layout(bucket), bucket.buffer()
        if self.clock is not None:
            self.clock.ready(layout)
        if isinstance(self._compressor, Sum):
            return self._sum(buffer, layout, self._compressor)
        assert self._pipeline is not None
        job = Job(
            bucket=self.store.buckets.get(layout) or self.store.bucket(layout, self._compressor, buffer.device),
            buffer=buffer,
            active=self._consume(layout, buffer),
            scale=self._last_scale,
            ready=recorded_event(self.device),
            future=Future(devices=[self.device] if self.device.type == "cuda" else []),
        )
        self._pipeline.submit(self._compressor, self._step, job)
        # set_exception alone would surface as "Unable to cast Python instance to Tensor"
        return job.future.then(lambda future: future.wait())

    def _begin_step(self) -> None:
        plan = RoomPlan(dense=self._compressor.kind == "sum" or self._next is not None)
        if self._compressor.kind != "sum":
            self._check_begin()
            if self._compressor.needs_room and self._next is None:
                plan = self.capacity.plan(self._compressor.words, self.budget.n_bytes, self._compressor.share)
        self._step = Backward(
            self.steps,
            plan,
            may_be_skipped=self._last_scale is not None,
            tensors_left=len(self.parameters),
            budget=self.budget if self.budget.rate is not None and self.budget.due else None,
        )

    def _check_begin(self) -> None:
        scale = None if self.scaler is None else self.scaler.scale(torch.ones((), device=self.device))
        updates = sum(parameter._version for parameter in self.parameters.values())
        if updates == self._updates:
            skipped = scale is not None and self._last_scale is not None and bool(scale < self._last_scale)
            if not skipped:
                raise GradwireError(SECOND_BACKWARD)
            self._step.take_back()  # the scaler found an inf in another model and left this one's step out too
        self._updates, self._last_scale = updates, scale

    def skip_step(self, *_: object) -> None:
        """The next backward is not a second one of the same step: an optimizer stepped, or was left out on purpose."""
        self._updates = None

    def on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer stepped. Fused ones and those that write to .data leave the versions as they are."""
        if self.over:
            return
        if any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"]):
            self.skip_step()
            if self._advised is not self._compressor:
                self._advised = self._compressor
                if dist.get_rank(self.group) == 0:
                    momentum_advice.tell(self._compressor, optimizer)
            if self.between_steps is not None:
                self.between_steps()

    def _end_step(self, finite: bool) -> None:
        if not finite:
            self.skip_step()  # a GradScaler leaves the parameters as they are
        elif self._next is not None:
            self._install(self._next)
        self.steps += 1
        if self.budget.rate is not None:
            self.budget.end_step()
        self._arrived()
        if self.recorder is not None:
            self.recorder.passes.begin_step(self.steps)
        for action in self.on_step:
            action()

    def _layout(self, bucket: GradBucket) -> Layout:
        """Looked at on every call: DDP rebuilds its buckets when it likes."""
        parameters = bucket.parameters()
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._layouts:
            self._layouts[key] = Layout.of((self._names[id(p)], p.shape) for p in parameters)
        return self._layouts[key]

    def _consume(self, layout: Layout, buffer: Tensor) -> Tensor | None:
        """Finishes the moments of a bucket; which of its tensors have a gradient, None for all."""
        recorder = self.recorder
        if recorder is not None:
            accounts = recorder.accounts
            active = [accounts[s.name].consume(buffer[s.offset : s.offset + s.numel]) for s in layout.slots]
        elif self.unused.listens:
            active = self.unused.seen(layout.names)
        else:
            return None
        return None if all(active) else torch.tensor(active, device=buffer.device)

    def _sum(self, buffer: Tensor, layout: Layout, method: Sum) -> Future[Tensor]:
        """Without the courier: the step is over when its last bucket is on its way."""
        context = Context(layout, self._step.number, world_size=self.world_size)
        part = Part(self._step, method, None, context, buffer, buffer, buffer)
        future = summed(part, self.group, self.meter, self._arrived)
        self._step.tensors_left -= len(layout.slots)
        if self._step.tensors_left == 0:
            self._step.done = True
            self.meter.end_step(dense=True)
            self._end_step(finite=True)
        return future

    def _arrived(self) -> None:
        if self.clock is not None:
            self.clock.arrived()

    def _bind(self, name: str, destination: Tensor) -> None:
        if self.recorder is not None:
            self.recorder.bind(name, destination)


def _refuse(model: nn.Module, args: object) -> None:
    if torch.is_grad_enabled():
        raise GradwireError(WRAPPED_ANEW)

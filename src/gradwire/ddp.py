"""The adapter: the only file that knows DistributedDataParallel. `attach`, and buckets <-> parameters."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real classes.
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.capacity import Capacity, Plan
from gradwire.compressors.base import Compressor, Gather, Sum
from gradwire.compressors.dense import Dense
from gradwire.delivery import Delivery, Parcel, Step
from gradwire.errors import AttachError, GradwireError
from gradwire.exchange import agree, courier_of
from gradwire.layout import Layout
from gradwire.moments import Recorder
from gradwire.stats import Meter
from gradwire.store import Store
from gradwire.wire.header import VERSION

BatchDim = int | Mapping[str, int | None]


class Link:
    """What stands between one DDP model and its process group: DDP calls `exchange` with every ready bucket."""

    def __init__(self, model: DistributedDataParallel, scaler: Any, moments: dict[str, Any]) -> None:
        self._model = weakref.ref(model)  # DDP's reducer holds this link: the other way round it would never be freed
        self.scaler, self._moments = scaler, moments
        self.group: dist.ProcessGroup = model.process_group
        self.world_size = dist.get_world_size(self.group)
        self.parameters = named_parameters(model)
        self.n_parameters = sum(p.numel() for p in self.parameters.values())
        self.device = next(iter(self.parameters.values())).device
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.compressor: Compressor
        self.recorder: Recorder | None = None
        self.store = Store(self._bind)
        self.meter = Meter(self.n_parameters, self.device)
        self.capacity = Capacity(self.n_parameters, self.world_size)
        self.steps = 0
        self.attached = True
        self.on_step: list[Any] = []
        self._delivery: Delivery | None = None
        self._step = Step(0, Plan(dense=True))
        self._updates: int | None = None  # the parameters' versions when the last exchange began
        self._layouts: dict[tuple[int, ...], Layout] = {}

    @property
    def model(self) -> DistributedDataParallel:
        model = self._model()
        assert model is not None  # it calls us
        return model

    def use(self, compressor: Compressor) -> None:
        """Makes `compressor` the one in use. Collective: all ranks compare before anything is sent."""
        agree(self.group, self._facts(compressor))
        self.compressor = compressor
        if compressor.needs_moments and self.recorder is None:
            self.recorder = Recorder(self.model, self.parameters, **self._moments)
        elif not compressor.needs_moments and self.recorder is not None:
            self.recorder.remove()
            self.recorder = None
        if isinstance(compressor, Gather) and self._delivery is None:
            self._delivery = Delivery(courier_of(self.group), self.meter, self.capacity, self._end_step)
        self.store.set(dict(self.store.items()), self.store.powers)  # the next bucket is laid out for this compressor

    def _facts(self, compressor: Compressor) -> dict[str, str]:
        tensors = "\n".join(f"{name} {tuple(p.shape)} {p.stride()} {p.dtype}" for name, p in self.parameters.items())
        model = f"{self.n_parameters} parameters in {len(self.parameters)} tensors\n{tensors}"
        return {
            "gradwire version": f"{gradwire.__version__}, message version {VERSION}",
            "compressor": repr(compressor),
            "model": model,
            "options of attach": f"{self._moments}, scaler={self.scaler is not None}",
            "history": f"step {self.steps}\n{self.capacity}",
        }

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """One ready bucket: its future holds the mean over the ranks."""
        if isinstance(self.compressor, Sum):
            return self._sum(bucket, self.compressor)
        assert self._delivery is not None
        if bucket.index() == 0:
            self._begin_step()
        layout = self._layout(bucket)
        parcel = Parcel(
            bucket=self.store.bucket(layout, self.compressor, bucket.buffer().device),
            buffer=bucket.buffer(),
            active=self._consume(layout, bucket.buffer()),
            scale=None if self.scaler is None else self.scaler.scale(torch.ones((), device=self.device)),
            is_last=bucket.is_last(),
            ready=_recorded_event(self.device),
            future=Future(devices=[self.device] if self.device.type == "cuda" else []),
        )
        self._delivery.submit(self.compressor, self._step, parcel)
        # set_exception alone would surface as "Unable to cast Python instance to Tensor"
        return parcel.future.then(lambda future: future.wait())

    def _begin_step(self) -> None:
        if self.model._join_config.enable:
            raise GradwireError("gradwire does not work under Join: give every rank the same number of batches")
        updates = sum(parameter._version for parameter in self.parameters.values())
        if updates == self._updates:
            raise GradwireError(
                "a second synced backward came before an optimizer step: its gradient would mix with what was already "
                "exchanged. If you accumulate, or another model's loss runs through this one (a GAN), wrap that "
                "backward in model.no_sync() or set requires_grad_(False) on this model while it runs; if you skipped "
                "an optimizer step on purpose, call wire.skip_step()."
            )
        self._updates = updates
        self._step = Step(self.steps, self.capacity.plan())

    def skip_step(self) -> None:
        """The next backward is not a second one of the same step."""
        self._updates = None

    def _end_step(self, finite: bool) -> None:
        if not finite:
            self.skip_step()  # a GradScaler leaves the parameters as they are
        self.steps += 1
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
        if recorder is None:
            return None
        active = [recorder.seen(name) for name in layout.names]
        for slot in layout:
            recorder.consume(slot.name, slot.of(buffer))
        return None if all(active) else torch.tensor(active, device=buffer.device)

    def _bind(self, name: str, destination: Tensor) -> None:
        if self.recorder is not None:
            self.recorder.bind(name, destination)

    def _sum(self, bucket: GradBucket, compressor: Sum) -> Future[Tensor]:
        """An all-reduce of the mean: multiplied by 1/W before the sum, exactly as DDP does it."""
        buffer, layout, start = bucket.buffer(), self._layout(bucket), time.perf_counter()
        self._add_residual(bucket, layout)
        buffer.mul_(1 / self.world_size)
        tensor = buffer.to(compressor.wire_dtype(buffer.dtype))
        n_bytes = tensor.numel() * tensor.element_size()
        self.meter.count(n_bytes, n_bytes, buffer.numel() * buffer.element_size())
        self.meter.everything(layout)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        if bucket.is_last():
            self.meter.end_step(dense=True)
            self._end_step(finite=True)

        def arrived(future: Future[list[Tensor]]) -> Tensor:
            reduced: Tensor = future.value()[0]
            self.meter.add_time("exchange", time.perf_counter() - start)
            return reduced if reduced is buffer else buffer.copy_(reduced)

        return work.get_future().then(arrived)  # type: ignore[no-any-return]

    def _add_residual(self, bucket: GradBucket, layout: Layout) -> None:
        """What an earlier compressor held back goes out with the first sum, so that nothing is lost."""
        for parameter, slot in zip(bucket.parameters(), layout, strict=True):
            if parameter.grad is None:
                continue  # unused: DDP would drop the result
            residual = self.store.flush(slot.name)
            if residual is not None:
                scaled = residual if self.scaler is None else self.scaler.scale(residual.clone())
                slot.of(bucket.buffer()).add_(scaled)


_switches: weakref.WeakKeyDictionary[DistributedDataParallel, "Switch"] = weakref.WeakKeyDictionary()


class Switch:
    """The hook's state. A hook registers once in a DDP model's life, so it delegates to the link there is now."""

    def __init__(self, link: Link | None) -> None:
        self.link = link

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled DDP model lists its hook and is not attached."""
        return Switch, (None,)


def _hook(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert switch.link is not None
    return switch.link.exchange(bucket)


def _recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """On a GPU: marks where the backward's stream stands now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def named_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP exchanges, by the name they have without DDP and torch.compile."""
    ignored = model.parameters_to_ignore
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def open_link(model: nn.Module, scaler: Any, moments: dict[str, Any]) -> Link:
    """Checks the model and puts a link between it and its process group."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"expected a DistributedDataParallel model, got {type(model).__name__}: wrap it first, "
            "model = DistributedDataParallel(net), then gradwire.attach(model, ...)"
        )
    _check_parameters(model)
    switch = _switches.get(model)
    if switch is not None and switch.link is not None and switch.link.attached:
        raise AttachError("this model is attached already: set wire.compressor = ..., or wire.detach() it first")
    link = Link(model, scaler, moments)
    if switch is None:
        switch = Switch(link)
        try:
            model.register_comm_hook(switch, _hook)
        except RuntimeError as error:
            raise AttachError(f"DDP refuses a communication hook: {error}. Does the model have another one?") from error
        _switches[model] = switch
    switch.link = link
    return link


def close_link(link: Link) -> None:
    """Plain DDP from the next backward on; what is held back goes out with it."""
    link.use(Dense())
    link.on_step.clear()
    link.attached = False


def _check_parameters(model: DistributedDataParallel) -> None:
    parameters = named_parameters(model)
    if not parameters:
        raise AttachError("this model has no parameter that requires a gradient: there is nothing to exchange")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise AttachError(f"{name} is complex ({parameter.dtype}): use torch.view_as_real parameters instead")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise AttachError(f"{name or 'the model'} makes sparse gradients: build it with sparse=False")

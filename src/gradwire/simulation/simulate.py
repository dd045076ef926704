"""W virtual workers in one process: what real ones compute and send, without torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError, CheckpointError
from gradwire.exchange.counting import Stats
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout, in_shape
from gradwire.methods import Compressor, compressor_of
from gradwire.methods.base import of_slot, powers
from gradwire.moments.batch_axis import BatchAxis
from gradwire.moments.batch_dim import BatchDim, root_axis_of
from gradwire.simulation import random_state as randomness
from gradwire.simulation.cuda_graphs import CapturedPasses
from gradwire.simulation.virtual_worker import Loss, VirtualWorker
from gradwire.state import checkpoint


def simulate(
    model: nn.Module,
    compressor: Compressor | str,
    loss: Loss,
    *,
    workers: int,
    seed: int = 0,
    capture: bool | None = None,
    messages: bool | None = None,
    batch_dim: BatchDim = 0,
    estimator: str = "groups",
    exact: bool = True,
    strict: bool = False,
    same_samples: bool = True,
) -> Simulation:
    """W workers that train `model`, each with its own samples, batch-norm statistics and compressor state.

    compressor: such as VGC(alpha=1.5), or its spec, "vgc:alpha=1.5".
    loss: (module, *batch) -> the loss of one worker; it is called with a copy of the model.
    seed: of the workers' random numbers (dropout), as `gradwire train --seed`.
    capture: the workers' passes as one CUDA graph; None: on a GPU.
    messages: whether every message is written and read back. Without it VGC and Strom are computed for all workers at
    once, and methods whose steps are all alike run as a CUDA graph; the elements are the same, and the length of a
    message is known from its room. None: not on a GPU, where messages would take longer than all the rest.
    batch_dim, estimator, exact, strict, same_samples: as of `attach`.
    """
    if workers < 1:
        raise ValueError(f"simulate: workers must be at least 1, got {workers}")
    if not model.training:
        raise AttachError("simulate wants a model that trains: model.train()")
    moments = {
        "batch_dim": batch_dim,
        "estimator": estimator,
        "exact": exact,
        "strict": strict,
        "same_samples": same_samples,
        "batch_axis": BatchAxis(root_axis_of(batch_dim, model)),  # the same in all copies of the model
    }
    return Simulation(model, compressor_of(compressor), loss, workers, seed, capture, messages, moments)


class Simulation:
    """The handle of a simulation. `model` has the parameters of all workers and the buffers of worker 0."""

    def __init__(
        self,
        model: nn.Module,
        compressor: Any,
        loss: Loss,
        workers: int,
        seed: int,
        capture: bool | None,
        messages: bool | None,
        moments: dict[str, Any],
    ) -> None:
        self.model, self.loss, self.workers = model, loss, workers
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise AttachError("simulate: no parameter of the model is trained")
        self.device = next(iter(self.parameters.values())).device
        self.layout = Layout.of((name, p.shape) for name, p in self.parameters.items())
        gpu, numel = self.device.type == "cuda", self.layout.numel
        self.gradients = torch.zeros(workers, numel, device=self.device)
        self.moments = torch.zeros(workers, numel if compressor.needs_moments else 0, device=self.device)
        self.ranks = InProcess(  # before the model is copied: it may refuse
            compressor,
            self.layout,
            workers,
            planned=True,
            device=self.device,
            batched=gpu if messages is None else not messages,
        )
        rows = enumerate(zip(self.gradients, self.moments, strict=True))
        self.replicas = [VirtualWorker(model, self.layout, *row, moments, buffers=rank == 0) for rank, row in rows]
        self._captures = gpu if capture is None else capture
        self._branches: CapturedPasses | None = None
        self._random = [self._seeded(seed, rank) for rank in range(workers)]

    def __repr__(self) -> str:
        size = f"{self.layout.numel} parameters, {self.workers} workers"
        return f"Simulation({self.compressor!r}, {size}, step {self.steps})"

    @property
    def steps(self) -> int:
        """Exchanges so far."""
        return self.ranks.number

    @property
    def compressor(self) -> Compressor:
        return self.ranks.compressor  # type: ignore[no-any-return]

    @compressor.setter
    def compressor(self, given: Compressor | str) -> None:
        """The same method with other options, from the next step on; what is held back stays."""
        compressor = compressor_of(given)
        if type(compressor) is not type(self.compressor):
            raise TypeError(f"a simulation of {self.compressor!r} goes on with the same method, not {compressor!r}")
        if compressor.needs_moments and not self.moments.numel():
            raise ValueError(f"a simulation of {self.compressor!r} has no second moments, which {compressor!r} needs")
        self.ranks.use(compressor)

    def backward(self, *batch: Tensor) -> Tensor:
        """One step of all workers: batch tensors are [W, B, ...], a row a worker. Returns their losses, [W].

        The mean over the workers of what they sent is in every parameter's `.grad` after it.
        """
        for tensor in batch:
            if tensor.shape[:1] != (self.workers,):
                shape = tuple(tensor.shape)
                raise ValueError(f"backward wants a row for each of the {self.workers} workers, got a tensor {shape}")
        losses = self._passes(batch)
        done = self.ranks.exchange(self.gradients, self.moments)
        if not done.finite:
            done.mean.fill_(torch.nan)  # as real workers: every one of them gets NaN
        for slot in self.layout:
            parameter = self.parameters[slot.name]
            parameter.grad = in_shape(slot.of(done.mean), parameter)
        return losses

    def _passes(self, batch: Sequence[Tensor]) -> Tensor:
        if self._captures:
            if self._branches is None:
                self._branches = CapturedPasses(self.replicas, self.loss, batch)
            if self._branches.fits(batch):
                return self._branches.run(batch)
        losses = []
        with self._forked_random():
            for rank, replica in enumerate(self.replicas):
                randomness.set_state(self._random[rank], self.device)
                losses.append(replica.backward(self.loss, [tensor[rank] for tensor in batch]))
                self._random[rank] = randomness.get_state(self.device)
        return torch.stack(losses)

    def _seeded(self, seed: int, rank: int) -> Tensor:
        with self._forked_random():
            randomness.seed_worker(seed, rank)
            return randomness.get_state(self.device)

    def _forked_random(self) -> AbstractContextManager[None]:
        """The caller's random numbers go on as if nothing had been drawn."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def stats(self) -> Stats:
        """What one worker sent, on average over all of them, since the beginning or the last `reset_stats`."""
        total = self.ranks.meter.stats([state.residual for state in self.ranks.states if hasattr(state, "residual")])
        bytes_of = {name: round(getattr(total, name) / self.workers) for name in ("bytes_sent", "dense_bytes")}
        return replace(
            total,
            **bytes_of,
            bytes_received=bytes_of["bytes_sent"] * (self.workers - 1),
            elements_sent={name: round(count / self.workers) for name, count in total.elements_sent.items()},
            deferred=round(total.deferred / self.workers),
            residual_norm=total.residual_norm / self.workers**0.5,
        )

    def reset_stats(self) -> None:
        """Starts the totals anew."""
        self.ranks.meter.reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model and the optimizer. Each worker's state is what `Wire.state_dict` is on its rank."""
        return {
            "workers": [self._worker_state(rank) for rank in range(self.workers)],
            "buffers": [{n: b.clone() for n, b in one.module.named_buffers()} for one in self.replicas],
            "random": [*(state.clone() for state in self._random), randomness.get_state(self.device)],
        }

    def _worker_state(self, rank: int) -> dict[str, Any]:
        state, capacity = self.ranks.states[rank], self.ranks.capacity
        fields = powers(state)
        return {
            "format": checkpoint.FORMAT,
            "compressor": repr(self.compressor),
            "world_size": self.workers,
            "rank": rank,
            "step": self.steps,
            "since_dense": capacity.since_dense,
            "passed": dict(capacity.passed),
            "powers": fields,
            "parameters": {
                slot.name: checkpoint.at_rest(of_slot(state, slot), fields, self.parameters[slot.name])
                for slot in self.layout
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved."""
        if not isinstance(state, Mapping) or not {"workers", "buffers", "random"} <= state.keys():
            raise CheckpointError("not the state of a simulation: expected a dict with workers, buffers, random")
        states = state["workers"]
        if len(states) != self.workers:
            raise CheckpointError(f"the state of {len(states)} workers, this simulation has {self.workers}")
        for rank, one in enumerate(states):
            checkpoint.check(one)
            if (one["rank"], one["world_size"]) != (rank, self.workers):
                raise CheckpointError(f"worker {rank} of the state is rank {one['rank']} of {one['world_size']}")
        fields = [checkpoint.match(self.parameters, one, strict=True) for one in states]
        for rank, found in enumerate(fields):
            self._put(rank, found)
            with torch.no_grad():
                for name, buffer in self.replicas[rank].module.named_buffers():
                    buffer.copy_(state["buffers"][rank][name])
        self.ranks.number = states[0]["step"]
        self.ranks.capacity.passed = dict(states[0]["passed"])
        self.ranks.capacity.since_dense = states[0]["since_dense"]
        *self._random, here = (one.clone() for one in state["random"])
        randomness.set_state(here, self.device)

    def _put(self, rank: int, found: dict[str, dict[str, Tensor]]) -> None:
        for slot in self.layout:
            for field, view in of_slot(self.ranks.states[rank], slot).items():
                known = found[slot.name].get(field)  # a field that the saved one had no use for begins at zero
                view.copy_(torch.zeros_like(view) if known is None else known)

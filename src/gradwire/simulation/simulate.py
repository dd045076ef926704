"""W virtual workers in one process: what real ones compute and send, without torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError, CheckpointError
from gradwire.exchange.counting import Stats
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout, in_shape
from gradwire.local_steps.recipe import Recipe, is_recipe, recipe_of
from gradwire.methods import Compressor, compressor_of
from gradwire.moments.batch_axis import BatchAxis
from gradwire.moments.batch_dim import BatchDim, root_axis_of
from gradwire.simulation.local_simulation import LocalSimulation, MakeOptimizer
from gradwire.simulation.virtual_worker import Loss, VirtualWorker
from gradwire.simulation.worker_passes import Passes
from gradwire.simulation.worker_states import of_one, put_back, saved


@overload
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
) -> Simulation: ...


@overload
def simulate(
    model: nn.Module,
    compressor: Recipe | Compressor | str,
    loss: Loss,
    *,
    workers: int,
    optimizer: MakeOptimizer,
    every: int | None = None,
    clip: float = 0.0,
    seed: int = 0,
    capture: bool | None = None,
    messages: bool | None = None,
    **recipe: Any,
) -> LocalSimulation: ...


def simulate(
    model: nn.Module,
    compressor: Recipe | Compressor | str,
    loss: Loss,
    *,
    workers: int,
    every: int | None = None,
    optimizer: MakeOptimizer | None = None,
    clip: float = 0.0,
    seed: int = 0,
    capture: bool | None = None,
    messages: bool | None = None,
    batch_dim: BatchDim = 0,
    estimator: str = "groups",
    exact: bool = True,
    strict: bool = False,
    same_samples: bool = True,
    **recipe: Any,
) -> Simulation | LocalSimulation:
    """W workers that train `model`, each with its own samples, batch-norm statistics and compressor state.

    compressor: such as VGC(alpha=1.5), or its spec, "vgc:alpha=1.5".
    loss: (module, *batch) -> the loss of one worker; it is called with a copy of the model.
    seed: of the workers' random numbers (dropout), as `gradwire train --seed`.
    capture: the workers' passes as one CUDA graph; None: on a GPU.
    messages: whether every message is written and read back. Without it VGC and Strom are computed for all workers at
    once, and methods whose steps are all alike run as a CUDA graph; the elements are the same, and the length of a
    message is known from its room. None: not on a GPU, where messages would take longer than all the rest.
    batch_dim, estimator, exact, strict, same_samples: as of `attach`.

    Local steps, `simulation.step(*batch)`, where `every` is given, or a recipe in the method's place ("diloco"):
    every: inner steps that each worker takes alone with an optimizer of its own, before what they add up to is sent.
    optimizer: (parameters of one worker) -> its optimizer.
    clip: the largest norm of a worker's own gradient; 0: any.
    recipe: other options of the round, as Recipe has them: outer_lr, outer_momentum, decay, fragments, delay, ...
    """
    if workers < 1:
        raise ValueError(f"simulate: workers must be at least 1, got {workers}")
    if not model.training:
        raise AttachError("simulate wants a model that trains: model.train()")
    if every is not None or is_recipe(compressor):
        if optimizer is None:
            raise ValueError("local steps need optimizer=, which makes one of a worker's parameters")
        chosen = recipe_of(compressor, every=every, **recipe)
        return LocalSimulation(model, chosen, loss, workers, optimizer, clip, seed, capture, messages)
    if optimizer is not None or clip or recipe:
        given = ", ".join([*(["optimizer"] if optimizer else []), *(["clip"] if clip else []), *recipe])
        raise ValueError(f"simulate: {given} means something in local steps alone: give every=")
    moments = {
        "batch_dim": batch_dim,
        "estimator": estimator,
        "exact": exact,
        "strict": strict,
        "same_samples": same_samples,
        "batch_axis": BatchAxis(root_axis_of(batch_dim, model)),  # the same in all copies of the model
    }
    assert not isinstance(compressor, Recipe)
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
        self.passes = Passes(self.replicas, loss, seed, gpu if capture is None else capture)

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
        losses = self.passes(batch)
        done = self.ranks.exchange(self.gradients, self.moments)
        if not done.finite:
            done.mean.fill_(torch.nan)  # as real workers: every one of them gets NaN
        for slot in self.layout:
            parameter = self.parameters[slot.name]
            parameter.grad = in_shape(slot.of(done.mean), parameter)
        return losses

    def stats(self) -> Stats:
        """What one worker sent, on average over all of them, since the beginning or the last `reset_stats`."""
        residuals = [state.residual for state in self.ranks.states if hasattr(state, "residual")]
        return of_one(self.ranks.meter.stats(residuals), self.workers)

    def reset_stats(self) -> None:
        """Starts the totals anew."""
        self.ranks.meter.reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model and the optimizer. Each worker's state is what `Wire.state_dict` is on its rank."""
        workers = [saved(self.ranks, rank, self.parameters) for rank in range(self.workers)]
        return {
            "workers": workers,
            "buffers": [{n: b.clone() for n, b in one.module.named_buffers()} for one in self.replicas],
            "random": self.passes.random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved."""
        if not isinstance(state, Mapping) or not {"workers", "buffers", "random"} <= state.keys():
            raise CheckpointError("not the state of a simulation: expected a dict with workers, buffers, random")
        put_back(self.ranks, state["workers"], self.parameters)
        for replica, buffers in zip(self.replicas, state["buffers"], strict=True):
            with torch.no_grad():
                for name, buffer in replica.module.named_buffers():
                    buffer.copy_(buffers[name])
        self.passes.set_random_state(state["random"])

"""How a run's virtual workers step: one optimizer on the mean of their gradients, or local steps of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradwire
from gradwire.simulation.virtual_worker import Loss
from gradwire.tools.experiment.experiment_file import Experiment, Run
from gradwire.tools.train import optimizers, tasks


class GradientSteps:
    """Gradients are exchanged, and one optimizer steps on their mean."""

    def __init__(self, experiment: Experiment, run: Run, model: nn.Module, loss: Loss) -> None:
        self.model, self.clip, method = model, experiment.clip, run.compressor(0.0)
        self.optimizer = made(experiment, run, method.own_momentum, model.parameters())
        self.simulation = gradwire.simulate(model, method, loss, workers=experiment.workers, seed=run.seed)

    def set_learning_rate(self, rate: float) -> None:
        optimizers.set_learning_rate(self.optimizer, rate)

    def step(self, *batch: Tensor) -> Tensor:
        """The workers' losses."""
        losses = self.simulation.backward(*batch)
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return losses

    def finish(self) -> None:
        """Nothing is left to do."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "simulation": self.simulation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.simulation.load_state_dict(state["simulation"])


class LocalSteps:
    """Every worker has an optimizer, which keeps its momentum whatever the method has."""

    def __init__(self, experiment: Experiment, run: Run, model: nn.Module, loss: Loss) -> None:
        make = partial(made, experiment, run, 0.0)
        options: dict[str, Any] = {"workers": experiment.workers, "clip": experiment.clip, "seed": run.seed}
        self.simulation = gradwire.simulate(model, run.recipe(), loss, optimizer=make, **options)

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self.simulation.optimizers:
            optimizers.set_learning_rate(optimizer, rate)

    def step(self, *batch: Tensor) -> Tensor:
        """The workers' losses."""
        return self.simulation.step(*batch)

    def finish(self) -> None:
        """At the end of the run: what was trained since the last round counts."""
        self.simulation.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"simulation": self.simulation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.simulation.load_state_dict(state["simulation"])


def made(
    experiment: Experiment, run: Run, momentum: float, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of a run; momentum: the method's own."""
    decay = tasks.find(experiment.task).weight_decay if experiment.weight_decay is None else experiment.weight_decay
    parameters = list(parameters)
    return optimizers.make(run.optimizer, parameters, 0.0, decay, parameters[0].is_cuda, momentum)

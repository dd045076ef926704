"""One run of an experiment: virtual workers that train, a row of figures an epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.exchange.counting import Stats
from gradwire.tools.experiment.experiment_file import Experiment, Run
from gradwire.tools.experiment.simulated_steps import GradientSteps, LocalSteps
from gradwire.tools.train import sharding, tasks
from gradwire.tools.train.task import Task

Row = dict[str, float]


PAD = 4  # pixels


class SimulatedTraining:
    """Trains epoch by epoch; `state_dict` between two of them is all there is."""

    def __init__(self, experiment: Experiment, run: Run, task: Task, device: torch.device) -> None:
        self.experiment, self.run, self.task, self.device = experiment, run, task, device
        kind = tasks.find(experiment.task)
        self.batch = experiment.batch or kind.batch
        torch.manual_seed(run.seed)
        self.model = task.make_model().to(device)
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.trained = (LocalSteps if run.is_local else GradientSteps)(experiment, run, self.model, self.loss)
        self.simulation = self.trained.simulation
        whole = sharding.steps_left(task.samples, experiment.workers, self.batch)
        self.steps = min(whole, experiment.steps_per_epoch or whole)
        self.epochs_done = 0

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.lowered():
            outputs = model(inputs)
        return self.task.loss(outputs.float(), targets)

    def lowered(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.precision == "bf16")

    def epoch(self) -> tuple[Row, dict[str, int]]:
        """The next epoch: its figures, and the elements that one worker sent in it, by parameter."""
        start, workers = time.perf_counter(), self.experiment.workers
        order = sharding.epoch_order(self.task.samples, self.run.seed, self.epochs_done).to(self.device)
        taken = order[: self.steps * workers * self.batch].view(self.steps, workers * self.batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.simulation.compressor = self.run.compressor(self.epochs_done / self.experiment.epochs)
        self.simulation.reset_stats()
        for number, indices in enumerate(taken):
            done = (self.epochs_done + number / self.steps) / self.experiment.epochs
            rate = self.experiment.rate_at(self.run, done)
            self.trained.set_learning_rate(rate)
            total += self._step(indices).double()
        if self.epochs_done + 1 == self.experiment.epochs:
            self.trained.finish()
        loss = float(total) / self.steps
        seconds = time.perf_counter() - start
        self.epochs_done += 1
        stats = self.simulation.stats()
        return self._row(loss, seconds, rate, stats), stats.elements_sent

    def _step(self, indices: Tensor) -> Tensor:
        """One step of all workers; their mean loss."""
        inputs, targets = self.task.batch(indices)
        if self.experiment.augment:
            inputs = crop_and_flip(inputs)
        rows = (self.experiment.workers, self.batch)
        batch = [tensor.view(*rows, *tensor.shape[1:]) for tensor in (inputs, targets)]
        return self.trained.step(*batch).mean()

    def _row(self, loss: float, seconds: float, rate: float, stats: Stats) -> Row:
        return {
            "epoch": self.epochs_done,
            "step": self.epochs_done * self.steps,
            "train_loss": loss,
            **self.evaluate(),
            "learning_rate": rate,
            "ratio": stats.ratio,
            "bytes_a_step": stats.bytes_sent / stats.steps,
            "dense_bytes_a_step": stats.dense_bytes / stats.steps,
            "dense_steps": stats.dense_steps,
            "deferred": stats.deferred,
            "delay": stats.delay,
            "residual_norm": stats.residual_norm,
            "seconds": seconds,
            "ms_a_step": 1000 * seconds / self.steps,
        }

    def evaluate(self) -> dict[str, float]:
        """With the batch-norm statistics of worker 0, as rank 0 would; with local steps the base weights and a mean."""
        self.model.eval()
        with torch.no_grad(), self.lowered():
            totals = self.task.evaluate(self.model)
        self.model.train()
        return self.task.score(totals)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            **self.trained.state_dict(),
            "epochs": self.epochs_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.trained.load_state_dict(state)
        self.epochs_done = state["epochs"]


def crop_and_flip(images: Tensor) -> Tensor:
    """The usual augmentation of images [N, C, H, W], on their device.

    Each is moved by up to 4 pixels, zeros coming in, and every other one mirrored.
    """
    count, channels, height, width = images.shape
    device = images.device
    moved = torch.randint(0, 2 * PAD + 1, (2, count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    across = torch.arange(width, device=device)
    rows = moved[0] + torch.arange(height, device=device)
    columns = moved[1] + torch.where(mirrored, across.flip(0), across)
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return F.pad(images, [PAD] * 4)[image, channel, rows[:, None, :, None], columns[:, None, None, :]]

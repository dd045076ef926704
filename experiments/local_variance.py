"""Has the variance a place in local steps? The score e^2 - alpha v beside plain magnitude, at equal elements and bytes.

`python -m experiments.local_variance DATA` trains the GPT of clipped.toml by local steps, H = 5 and one element in ten,
once for each score and seed, and writes experiments/results/local-variance.csv. v is, of what the round's delta is:

    magnitude  nothing: alpha = 0
    samples    sum over the inner steps of (lr s / (sqrt(v_adam) + eps))^2 times the sum over samples of c_z^2
    adamw      the same with AdamW's own second moment in the place of the samples': free
    steps      sum over the inner steps of (weights before - weights after)^2, element by element: free

s = 1 - beta1^n is the part of a gradient that its momentum has brought into the weights after the n steps that the
round still has. From round to round v decays with the square of e's factor.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from experiments import FOLDER
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout, in_shape
from gradwire.local_steps.outer_step import decay, outer_step
from gradwire.local_steps.recipe import Recipe
from gradwire.methods import VGC
from gradwire.moments.batch_axis import BatchAxis
from gradwire.simulation.virtual_worker import VirtualWorker
from gradwire.simulation.worker_passes import Passes
from gradwire.tools.experiment.experiment_file import Experiment, open_task, read
from gradwire.tools.provenance import provenance
from gradwire.tools.result_files import read as read_rows
from gradwire.tools.train import sharding
from gradwire.tools.train.task import Task

EVERY, DENSITY, DECAY = 5, 0.1, 0.95
SCORES = (("magnitude", 0.0), ("samples", 1.0), ("adamw", 1.0), ("steps", 1.0), ("samples", 0.3))
SEEDS, RATE = (0, 1, 2), 1.0
RESULTS = FOLDER / "results" / "local-variance.csv"
COLUMNS = ("score", "alpha", "seed", "step", "bits_per_byte", "train_loss", "bytes_a_step")


class Training:
    """W workers in one process, each with weights and an AdamW of its own."""

    def __init__(self, experiment: Experiment, task: Task, score: str, alpha: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.score, self.workers = task, score, experiment.workers
        self.model = task.make_model()
        self.layout = Layout.of((name, p.shape) for name, p in self.model.named_parameters())
        self.base = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.weights = self.base.repeat(self.workers, 1)
        self.gradients, self.variance = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        samples = torch.zeros_like(self.weights) if score == "samples" else self.weights[:, :0]
        options: dict[str, Any] = {"batch_axis": BatchAxis(0)}
        rows = zip(self.gradients, samples, self.weights, strict=True)
        self.samples = samples
        self.replicas = [VirtualWorker(self.model, self.layout, g, m, options, False, w) for g, m, w in rows]
        self.passes = Passes(self.replicas, lambda net, x, y: task.loss(net(x), y), seed, captures=False)
        self.optimizers = [
            torch.optim.AdamW(one.parameters.values(), weight_decay=experiment.weight_decay or 0.0)
            for one in self.replicas
        ]
        method = VGC(alpha=alpha, density=DENSITY, feedback=True, zeta=DECAY**2)
        self.recipe = Recipe("dense", EVERY, decay=DECAY)  # its outer step and decay; the method is this one's
        self.ranks = InProcess(method, self.layout, self.workers, planned=True)
        self.steps = self.n_bytes = 0

    def step(self, batch: Sequence[Tensor], rate: float, clip: float) -> float:
        """One inner step of all, and a round after the last of five."""
        losses = self.passes(batch)
        left = EVERY - self.steps % EVERY  # inner steps in which this gradient still moves the weights
        for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
            replica.hand_over()
            norm = nn.utils.clip_grad_norm_(replica.parameters.values(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            before = self.weights[rank].clone() if self.score == "steps" else None
            optimizer.step()
            if before is not None:
                self.variance[rank] += (self.weights[rank] - before).square()
            else:
                self._add_variance(rank, optimizer, rate, left, float(min(1.0, clip / norm)))
        self.steps += 1
        if self.steps % EVERY == 0:
            self._round()
        return float(losses.mean())

    def _add_variance(self, rank: int, optimizer: Any, rate: float, left: int, clipped: float) -> None:
        """v += (lr s / (sqrt(v_adam) + eps))^2 q, q: of the samples' contributions, or AdamW's second moment."""
        if self.score == "magnitude":
            return
        (beta1, beta2), eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
        arrived = 1 - beta1**left
        for slot in self.layout:
            state = optimizer.state[self.replicas[rank].parameters[slot.name]]
            second = (state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))).flatten()
            scale = (rate * arrived / (second.sqrt() + eps)).square()
            squares = slot.of(self.samples[rank]) * clipped**2 if self.score == "samples" else second
            slot.of(self.variance[rank]).add_(scale * squares)

    def _round(self) -> None:
        deltas = self.base - self.weights
        for state in self.ranks.states:
            decay(self.recipe, state.residual)
        done = self.ranks.exchange(deltas, self.variance.clone())
        self.n_bytes += done.n_bytes
        outer_step(self.recipe, self.base, done.mean, None)
        self.weights.copy_(self.base)
        self.variance.zero_()

    def bits_per_byte(self) -> float:
        with torch.no_grad():
            for slot, parameter in zip(self.layout, self.model.parameters(), strict=True):
                parameter.copy_(in_shape(slot.of(self.base), parameter))
            self.model.eval()
            totals = self.task.evaluate(self.model)
            self.model.train()
        return self.task.score(totals)["bits_per_byte"]


def train(experiment: Experiment, task: Task, score: str, alpha: float, seed: int) -> dict[str, Any]:
    """The last row of a run."""
    training = Training(experiment, task, score, alpha, seed)
    per_epoch, batch = experiment.steps_per_epoch, experiment.batch or 1
    total = experiment.epochs * per_epoch
    losses: list[float] = []
    for epoch in range(experiment.epochs):
        order = sharding.epoch_order(task.samples, seed, epoch)
        for number in range(per_epoch):
            at = number * training.workers * batch
            tensors = task.batch(order[at : at + training.workers * batch])
            rows = [one.view(training.workers, batch, *one.shape[1:]) for one in tensors]
            done = (epoch + number / per_epoch) / experiment.epochs
            rate = experiment.schedule["adamw"].at(done) * experiment.learning_rate["adamw"] * RATE
            losses.append(training.step(rows, rate, experiment.clip))
    return {
        "score": score,
        "alpha": alpha,
        "seed": seed,
        "step": total,
        "bits_per_byte": training.bits_per_byte(),
        "train_loss": sum(losses[-per_epoch:]) / per_epoch,
        "bytes_a_step": training.n_bytes / total,
    }


def table() -> str:
    """A row a score, over the seeds that have run."""
    rows = read_rows(RESULTS)
    lines = ["| v | alpha | bits per byte | seeds, each | bytes a step |", "|---|---|---|---|---|"]
    for score, alpha in sorted({(row["score"], row["alpha"]) for row in rows}):
        found = [row for row in rows if (row["score"], row["alpha"]) == (score, alpha)]
        bits = [float(row["bits_per_byte"]) for row in found]
        each = ", ".join(f"{one:.4f}" for one in bits)
        n_bytes = fmean(float(row["bytes_a_step"]) for row in found)
        lines.append(f"| {score} | {float(alpha):g} | {fmean(bits):.4f} | {each} | {n_bytes:,.0f} |")
    return "\n".join(lines) + "\n"


def main(data: Path) -> None:
    experiment = read(FOLDER / "clipped.toml")
    task = open_task(experiment, data)
    command, rows = "python -m experiments.local_variance DATA", []
    for seed in SEEDS:
        for score, alpha in SCORES:
            rows.append({**train(experiment, task, score, alpha, seed), **provenance(command=command)})
            print({name: rows[-1][name] for name in COLUMNS}, flush=True)
            with RESULTS.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

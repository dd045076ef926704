"""The training loop of one worker: a plain DDP loop with one added line, `gradwire.attach`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import gradwire
from gradwire.simulation.random_state import seed_worker
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.metrics import Row, Traffic
from gradwire.tools.train.reporter import Reporter
from gradwire.tools.train.run_state import RunState
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import WorkerGroup


class Trainer:
    """Model, optimizer, wire and state of a run on this worker."""

    def __init__(self, plan: TrainingPlan, group: WorkerGroup, reporter: Reporter) -> None:
        self.plan, self.group, self.reporter = plan, group, reporter
        torch.manual_seed(plan.settings.seed)
        self.model = plan.task.make_model().to(group.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.ddp = group.wrap(self.model)
        self.wire = gradwire.attach(self.ddp, plan.compressor)
        own, decay = plan.compressor.own_momentum, plan.weight_decay
        self.optimizer = optimizers.make(plan.settings.optimizer, self.model.parameters(), 0.0, decay, momentum=own)
        self.state = RunState()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=group.device)  # this worker's, in this epoch
        self.base = Traffic()  # what the wire had counted when the epoch, or this process, began
        seed_worker(plan.settings.seed, group.rank)

    def run(self, save: Callable[[], None] | None = None) -> None:
        """Train to the last epoch, saving after every epoch and every `save_every` steps."""
        done = self.state.step
        self.reporter.begin(self.plan.title, done, done + self.steps_left(), self.plan.epochs)
        self.base = Traffic.of(self.wire.stats())
        while self.state.epoch < self.plan.epochs:
            self.run_epoch(save)
            self.close_epoch()
            if save:
                save()

    def run_epoch(self, save: Callable[[], None] | None) -> None:
        """The rest of the epoch the run stands in."""
        plan, group, state = self.plan, self.group, self.state
        optimizers.set_learning_rate(self.optimizer, plan.schedule.at(state.epoch, group.world))
        order = sharding.epoch_order(plan.task.samples, plan.settings.seed, state.epoch)
        left = self.epoch_steps_left()
        for indices in sharding.batches(order, group.rank, group.world, plan.batch, state.position):
            if left == 0:
                break
            start = time.perf_counter()
            loss = self.take_step(indices)
            group.synchronize()
            state.seconds += time.perf_counter() - start
            left -= 1
            if self.reporter.due():
                sent = Traffic.of(self.wire.stats()) - self.base + state.traffic + state.total
                self.reporter.step(state.step, state.epoch + 1, loss.item(), sent.bytes_sent / 1e6)
            if save and left and plan.settings.save_every and state.step % plan.settings.save_every == 0:
                save()

    def take_step(self, indices: Tensor) -> Tensor:
        """One step of the optimizer on this worker's batch; returns its loss."""
        inputs, targets = (tensor.to(self.group.device) for tensor in self.plan.task.batch(indices))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.plan.task.loss(self.ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(indices)
        self.state.step += 1
        self.state.epoch_step += 1
        self.state.position += len(indices) * self.group.world
        return loss.detach()

    def gather_state(self) -> RunState:
        """The state with what this process has added to it: to be saved, or to close the epoch. All ranks."""
        self.state.loss_sum += float(self.group.sum(self.loss_sum))
        self.loss_sum.zero_()
        now = Traffic.of(self.wire.stats())
        self.state.traffic += now - self.base
        self.base = now
        return self.state

    def close_epoch(self) -> None:
        """Test the model and write down the epoch."""
        state, plan = self.gather_state(), self.plan
        row: Row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "train_loss": state.loss_sum / state.position,
            **self.group.score(plan.task, self.model),
            "seconds": state.seconds,
            "ms_per_step": 1000 * state.seconds / state.epoch_step,
            "workers": self.group.world,
            "learning_rate": plan.schedule.at(state.epoch, self.group.world),
            **state.traffic.per_step(self.parameters),
            "delay": float(self.wire.stats().delay),
        }
        state.next_epoch(row)
        self.reporter.epoch(row, plan.task.scores[0], state.total.bytes_sent / 1e6)

    def epoch_steps_left(self) -> int:
        """Steps this epoch still has, here and now."""
        plan, state = self.plan, self.state
        left = sharding.steps_left(plan.task.samples, self.group.world, plan.batch, state.position)
        return (
            min(left, max(0, plan.settings.steps_per_epoch - state.epoch_step))
            if plan.settings.steps_per_epoch
            else left
        )

    def steps_left(self) -> int:
        """Steps to the end of the run, for the progress bar."""
        plan, state = self.plan, self.state
        whole = sharding.steps_left(plan.task.samples, self.group.world, plan.batch)
        whole = min(whole, plan.settings.steps_per_epoch) if plan.settings.steps_per_epoch else whole
        return self.epoch_steps_left() + whole * max(0, plan.epochs - state.epoch - 1)

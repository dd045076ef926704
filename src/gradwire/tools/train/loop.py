"""The training loop of one worker: a plain DDP loop with one added line, `gradwire.attach`."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

import gradwire
from gradwire.simulation.random_state import seed_worker
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.metrics import Row, RunState, Traffic
from gradwire.tools.train.reporter import Reporter
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
        seed_worker(plan.settings.seed, group.rank)

    def run(self, save: Callable[[], None] | None = None) -> None:
        """Train to the last epoch, saving after every epoch and every `save_every` steps."""
        done = self.state.step
        left = self.steps_left() + self.epoch_steps() * max(0, self.plan.epochs - self.state.epoch - 1)
        self.reporter.begin(self.plan.title, done, done + left, self.plan.epochs)
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
        batches = sharding.batches(order, group.rank, group.world, plan.batch, state.position)
        for indices in islice(batches, self.steps_left()):
            start = time.perf_counter()
            loss = self.take_step(indices)
            group.synchronize()
            state.seconds += time.perf_counter() - start
            if self.reporter.due():
                sent = self.wire.stats().bytes_sent + state.traffic.bytes_sent + state.total.bytes_sent
                self.reporter.step(state.step, state.epoch + 1, loss.item(), sent / 1e6)
            if save and plan.settings.save_every and state.step % plan.settings.save_every == 0 and self.steps_left():
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
        self.state.traffic += Traffic.of(self.wire.stats())
        self.wire.reset_stats()
        return self.state

    def close_epoch(self) -> None:
        """Test the model and write down the epoch."""
        delay = self.wire.stats().delay
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
            "delay": delay,
        }
        state.next_epoch(row)
        self.reporter.epoch(row, plan.task.scores[0], state.total.bytes_sent / 1e6)

    def epoch_steps(self) -> int:
        """Steps of a whole epoch."""
        whole = sharding.steps_left(self.plan.task.samples, self.group.world, self.plan.batch)
        return min(whole, self.plan.settings.steps_per_epoch or whole)

    def steps_left(self) -> int:
        """Steps this epoch still has, here and now."""
        plan, state = self.plan, self.state
        left = sharding.steps_left(plan.task.samples, self.group.world, plan.batch, state.position)
        limit = plan.settings.steps_per_epoch
        return min(left, max(0, limit - state.epoch_step)) if limit else left

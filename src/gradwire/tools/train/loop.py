"""The training loop of one worker, a plain one with one added line: `gradwire.attach` on DDP, or `gradwire.local`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

import gradwire
from gradwire.simulation.random_state import seed_worker
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.metrics import Row, RunState, Traffic
from gradwire.tools.train.reporter import Reporter
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import WorkerGroup, own_buffers


class Trainer:
    """Model, optimizer, wire and state of a run on this worker."""

    def __init__(self, plan: TrainingPlan, group: WorkerGroup, reporter: Reporter) -> None:
        self.plan, self.group, self.reporter = plan, group, reporter
        torch.manual_seed(plan.settings.seed)
        self.model = plan.task.make_model().to(group.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        own, decay = plan.own_momentum, plan.weight_decay
        self.optimizer = optimizers.make(plan.settings.optimizer, self.model.parameters(), 0.0, decay, momentum=own)
        self.net: nn.Module  # what the training calls
        self.wire: gradwire.Wire | gradwire.LocalWire
        self.local: gradwire.LocalWire | None = None
        if plan.recipe is None:
            self.net = group.wrap(self.model)
            self.wire = gradwire.attach(self.net, plan.compressor)
        else:
            self.net = self.model
            self.wire = self.local = gradwire.local(self.model, self.optimizer, plan.recipe)
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
                self.reporter.step(state.step, state.epoch + 1, loss.item(), sent / 1e6, self.round())
            if save and plan.settings.save_every and state.step % plan.settings.save_every == 0 and self.steps_left():
                save()

    def take_step(self, indices: Tensor) -> Tensor:
        """One step of the optimizer on this worker's batch; returns its loss."""
        inputs, targets = (tensor.to(self.group.device) for tensor in self.plan.task.batch(indices))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.plan.task.loss(self.net(inputs), targets)
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
        self.state.traffic += self.traffic()
        self.wire.reset_stats()
        return self.state

    def traffic(self) -> Traffic:
        """Since the last reset."""
        if self.local is None:
            stats = self.wire.stats()
            return Traffic.of(stats, stats.steps)
        self.local.wait()  # bytes of a late sum count where it began, whether the run stops here or not
        local = self.local.stats()
        return Traffic.of(local, local.exchanges / self.local.recipe.fragments)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """In here the model is what all workers have alike: inside a round of local steps each has its own."""
        if self.local is None:
            yield
            return
        with own_buffers(self.model), self.local.base_weights():
            yield

    def round(self) -> str:
        """Where local steps stand, for the user."""
        if self.local is None:
            return ""
        whole, inside = divmod(self.local.steps, self.local.recipe.every)
        return f"round {whole + 1}, step {inside}/{self.local.recipe.every}  "

    def close_epoch(self) -> None:
        """Test the model and write down the epoch."""
        if self.local is not None:
            self.local.finish() if self.state.epoch + 1 >= self.plan.epochs else self.local.wait()
        delay = self.wire.stats().delay
        state, plan = self.gather_state(), self.plan
        with self.shared_weights():
            scores = self.group.score(plan.task, self.model)
        row: Row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "train_loss": state.loss_sum / state.position,
            **scores,
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

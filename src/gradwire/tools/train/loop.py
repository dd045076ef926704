"""The training loop of one worker: a plain DDP loop with one added line, `gradwire.attach`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.simulation.random_state import seed_worker
from gradwire.tools.train import optimizers, sharding
from gradwire.tools.train.metrics import Row, Traffic
from gradwire.tools.train.progress import Reporter
from gradwire.tools.train.settings import Plan
from gradwire.tools.train.standing import Standing
from gradwire.tools.train.task import Share
from gradwire.tools.train.team import Team


class Trainer:
    """Model, optimizer, wire and standing of a run on this worker."""

    def __init__(self, plan: Plan, team: Team, reporter: Reporter) -> None:
        self.plan, self.team, self.reporter = plan, team, reporter
        torch.manual_seed(plan.seed)
        self.model = plan.task.make_model().to(team.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        gpu = [team.device.index] if team.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=gpu)
        self.wire = gradwire.attach(self.ddp, plan.compressor)
        own, decay = plan.compressor.own_momentum, plan.weight_decay
        self.optimizer = optimizers.make(plan.optimizer, self.model.parameters(), 0.0, decay, momentum=own)
        self.standing = Standing()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=team.device)  # this worker's, in this epoch
        self.base = Traffic()  # what the wire had counted when the epoch, or this process, began
        seed_worker(plan.seed, team.rank)

    def run(self, save: Callable[[], None] | None = None) -> None:
        """Train to the last epoch, saving after every epoch and every `save_every` steps."""
        done = self.standing.step
        self.reporter.begin(self.plan.title, done, done + self.steps_left(), self.plan.epochs)
        self.base = Traffic.of(self.wire.stats())
        while self.standing.epoch < self.plan.epochs:
            self.run_epoch(save)
            self.close_epoch()
            if save:
                save()

    def run_epoch(self, save: Callable[[], None] | None) -> None:
        """The rest of the epoch the run stands in."""
        plan, team, standing = self.plan, self.team, self.standing
        optimizers.set_learning_rate(self.optimizer, plan.schedule.at(standing.epoch, team.world))
        order = sharding.epoch_order(plan.task.samples, plan.seed, standing.epoch)
        left = self.epoch_steps_left()
        for indices in sharding.batches(order, team.rank, team.world, plan.batch, standing.position):
            if left == 0:
                break
            start = time.perf_counter()
            loss = self.take_step(indices)
            team.synchronize()
            standing.seconds += time.perf_counter() - start
            left -= 1
            if self.reporter.due():
                sent = Traffic.of(self.wire.stats()) - self.base + standing.traffic + standing.total
                self.reporter.step(standing.step, standing.epoch + 1, loss.item(), sent.bytes_sent / 1e6)
            if save and left and plan.save_every and standing.step % plan.save_every == 0:
                save()

    def take_step(self, indices: Tensor) -> Tensor:
        """One step of the optimizer on this worker's batch; returns its loss."""
        inputs, targets = (tensor.to(self.team.device) for tensor in self.plan.task.batch(indices))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.plan.task.loss(self.ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(indices)
        self.standing.step += 1
        self.standing.epoch_step += 1
        self.standing.position += len(indices) * self.team.world
        return loss.detach()

    def gather_standing(self) -> Standing:
        """The standing with what this process has added to it: to be saved, or to close the epoch. All ranks."""
        self.standing.loss_sum += float(self.team.sum(self.loss_sum))
        self.loss_sum.zero_()
        now = Traffic.of(self.wire.stats())
        self.standing.traffic += now - self.base
        self.base = now
        return self.standing

    def close_epoch(self) -> None:
        """Test the model and write down the epoch."""
        standing, plan = self.gather_standing(), self.plan
        row: Row = {
            "epoch": standing.epoch + 1,
            "step": standing.step,
            "train_loss": standing.loss_sum / standing.position,
            **self.evaluate(),
            "seconds": standing.seconds,
            "ms_per_step": 1000 * standing.seconds / standing.epoch_step,
            "workers": self.team.world,
            "learning_rate": plan.schedule.at(standing.epoch, self.team.world),
            **standing.traffic.per_step(self.parameters),
            "delay": float(self.wire.stats().delay),
        }
        standing.next_epoch(row)
        self.reporter.epoch(row, plan.task.scores[0], standing.total.bytes_sent / 1e6)

    def evaluate(self) -> dict[str, float]:
        """The task's scores on the held-out data, each worker testing its share of it."""
        self.team.share_buffers(self.model)
        self.model.eval()
        with torch.no_grad():
            totals = self.plan.task.evaluate(self.model, Share(self.team.rank, self.team.world))
        self.model.train()
        return self.plan.task.score(self.team.sum(totals))

    def epoch_steps_left(self) -> int:
        """Steps this epoch still has, here and now."""
        plan, standing = self.plan, self.standing
        left = sharding.steps_left(plan.task.samples, self.team.world, plan.batch, standing.position)
        return min(left, max(0, plan.steps_per_epoch - standing.epoch_step)) if plan.steps_per_epoch else left

    def steps_left(self) -> int:
        """Steps to the end of the run, for the progress bar."""
        plan, standing = self.plan, self.standing
        whole = sharding.steps_left(plan.task.samples, self.team.world, plan.batch)
        whole = min(whole, plan.steps_per_epoch) if plan.steps_per_epoch else whole
        return self.epoch_steps_left() + whole * max(0, plan.epochs - standing.epoch - 1)

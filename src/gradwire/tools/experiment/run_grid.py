"""All runs of an experiment, one after another: those that are done are skipped, one that was cut goes on.

Several processes may share a folder: each takes runs that no other one has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import TaskID

from gradwire.tools.experiment.experiment_file import Experiment, Run
from gradwire.tools.experiment.run_files import RunFiles, taken
from gradwire.tools.experiment.simulated_training import Row, SimulatedTraining
from gradwire.tools.progress import Bars, show
from gradwire.tools.provenance import provenance
from gradwire.tools.train.task import Task


class GridProgress(Bars):
    """What the user sees of it: a bar over the epochs of all runs on a terminal, and a line a run."""

    def __init__(self, epochs: int, score: str) -> None:
        super().__init__()
        self.epochs, self.score, self.bar = epochs, score, TaskID(0)

    def runs(self, runs: int, done: int) -> None:
        """How many there are, and how many of their epochs are done."""
        self.bar = self.begin("epochs", runs * self.epochs, done)
        if self.disable:
            self.line(f"{runs} runs of {self.epochs} epochs, {done} epochs of them done")

    def epoch(self, run: Run, number: int, row: Row) -> None:
        figures = f"loss {row['train_loss']:.4f}  {show(self.score, row[self.score])}  ratio {row['ratio']:.1f}"
        line = f"{run.name}  epoch {number}/{self.epochs}  {figures}  {row['ms_a_step']:.1f} ms a step"
        self.update(self.bar, advance=1, state=line)
        if number == self.epochs:
            self.line(line)

    def skip(self, run: Run, why: str) -> None:
        self.line(f"{run.name}  {why}")


@dataclass
class Runner:
    """save_every: seconds between two saves; minutes: after which it stops, with a save; 0 for never.

    command: what goes into the files as the one that made them.
    """

    experiment: Experiment
    task: Task
    device: torch.device
    folder: Path
    watcher: GridProgress
    save_every: float = 120.0
    minutes: float = 0.0
    command: str = ""
    clock: Callable[[], float] = time.monotonic

    def __call__(self, only: Sequence[str] = ("",)) -> bool:
        """Whether everything is done. only: runs whose name has one of these in it, in this order."""
        self.folder.mkdir(parents=True, exist_ok=True)
        end = self.clock() + 60 * (self.minutes or float("inf"))
        runs = list(dict.fromkeys(run for part in only for run in self.experiment.runs if part in run.name))
        self.watcher.runs(len(runs), sum(self._done(run) for run in runs))
        for run in runs:
            with taken(self.folder, run.name) as mine:
                if not mine:
                    self.watcher.skip(run, "is in the hands of another process")
                elif self._done(run) == self.experiment.epochs:
                    self.watcher.skip(run, "is done")
                elif self.clock() > end:
                    return False
                else:
                    self._train(run, end)
        return all(self._done(run) == self.experiment.epochs for run in runs)

    def _done(self, run: Run) -> int:
        """Epochs that are written down."""
        return min(RunFiles(self.folder, run.name).epochs(), self.experiment.epochs)

    def _train(self, run: Run, end: float) -> None:
        """To its end, or until the time is up."""
        files, origin = RunFiles(self.folder, run.name), provenance(self.device.type, self.command)
        trainer = SimulatedTraining(self.experiment, run, self.task, self.device)
        if (state := files.load()) is not None:
            trainer.load_state_dict(state)
        files.cut(trainer.epochs_done)
        saved, late = self.clock(), False
        while trainer.epochs_done < self.experiment.epochs and not late:
            row, elements = trainer.epoch()
            files.add(row, {name: count / trainer.steps for name, count in elements.items()}, origin)
            self.watcher.epoch(run, trainer.epochs_done, row)
            late = self.clock() > end
            if late or (self.save_every and self.clock() - saved > self.save_every):
                files.save(trainer.state_dict())
                saved = self.clock()
        if trainer.epochs_done == self.experiment.epochs:
            files.finish()

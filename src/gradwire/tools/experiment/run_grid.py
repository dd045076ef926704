"""All runs of an experiment, one after another: those that are done are skipped, one that was cut goes on.

Several processes may share a folder: each takes runs that no other one has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradwire.tools.experiment.experiment_file import Experiment
from gradwire.tools.experiment.grid import Run
from gradwire.tools.experiment.grid_progress import GridProgress
from gradwire.tools.experiment.run_files import RunFiles, taken
from gradwire.tools.experiment.simulated_training import SimulatedTraining
from gradwire.tools.provenance import provenance
from gradwire.tools.train.task import Task


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
    _begun: float = 0.0

    def __call__(self, only: Sequence[str] = ("",)) -> bool:
        """Whether everything is done. only: runs whose name has one of these in it, in this order."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begun = self.clock()
        runs = list(dict.fromkeys(run for part in only for run in self.experiment.runs if part in run.name))
        self.watcher.runs(len(runs), sum(self._done(run) for run in runs))
        for run in runs:
            with taken(self.folder, run.name) as mine:
                if not mine:
                    self.watcher.skip(run, "is in the hands of another process")
                elif self._done(run) == self.experiment.epochs:
                    self.watcher.skip(run, "is done")
                elif self._late():
                    return False
                else:
                    self._train(run)
        return all(self._done(run) == self.experiment.epochs for run in runs)

    def _done(self, run: Run) -> int:
        """Epochs that are written down."""
        return min(RunFiles(self.folder, run.name).epochs(), self.experiment.epochs)

    def _late(self) -> bool:
        return bool(self.minutes) and self.clock() - self._begun > 60 * self.minutes

    def _train(self, run: Run) -> None:
        """To its end, or until the time is up."""
        files, origin = RunFiles(self.folder, run.name), provenance(self.device.type, self.command)
        trainer = SimulatedTraining(self.experiment, run, self.task, self.device)
        if (state := files.load()) is not None:
            trainer.load_state_dict(state)
        files.cut(trainer.epochs_done)
        saved = self.clock()
        while trainer.epochs_done < self.experiment.epochs:
            epoch = trainer.epoch()
            files.add(epoch, trainer.steps, origin)
            self.watcher.epoch(run, trainer.epochs_done, epoch.row)
            if self._late() or (self.save_every and self.clock() - saved > self.save_every):
                files.save(trainer.state_dict())
                saved = self.clock()
            if self._late():
                break
        if trainer.epochs_done == self.experiment.epochs:
            files.finish()

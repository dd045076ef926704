"""What the user sees of an experiment: a bar over the epochs of all runs on a terminal, and a line a run."""

from __future__ import annotations

from rich.progress import TaskID

from gradwire.tools.experiment.grid import Run
from gradwire.tools.experiment.simulated_training import Row
from gradwire.tools.progress import Bars, show


class GridProgress(Bars):
    """Told how far an experiment has come."""

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

"""What the user sees of an experiment: a bar with the time left on a terminal, a line a run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gradwire.tools.experiment.experiment_file import Experiment
from gradwire.tools.experiment.grid import Run
from gradwire.tools.experiment.run_grid import Watcher
from gradwire.tools.experiment.simulated_training import Row
from gradwire.tools.progress import show


class Lines:
    """One line a run, when it ends or is skipped."""

    def __init__(self, epochs: int, score: str) -> None:
        self.epochs, self.score = epochs, score

    def begin(self, runs: int, epochs: int, done: int) -> None:
        print(f"{runs} runs of {epochs} epochs, {done} epochs of them done", flush=True)

    def epoch(self, run: Run, number: int, row: Row) -> None:
        if number == self.epochs:
            print(self.line(run, number, row), flush=True)

    def line(self, run: Run, number: int, row: Row) -> str:
        figures = f"loss {row['train_loss']:.4f}  {show(self.score, row[self.score])}  ratio {row['ratio']:.1f}"
        return f"{run.name}  epoch {number}/{self.epochs}  {figures}  {row['ms_a_step']:.1f} ms a step"

    def skip(self, run: Run, why: str) -> None:
        print(f"{run.name}  {why}", flush=True)


class Bar(Lines):
    """A bar over the epochs of all runs."""

    def __init__(self, epochs: int, score: str, progress: Progress) -> None:
        super().__init__(epochs, score)
        self.progress, self.task = progress, TaskID(0)

    def begin(self, runs: int, epochs: int, done: int) -> None:
        self.task = self.progress.add_task("epochs", total=runs * epochs, completed=done, state="")

    def epoch(self, run: Run, number: int, row: Row) -> None:
        self.progress.update(self.task, advance=1, state=self.line(run, number, row))
        if number == self.epochs:
            self.progress.console.print(self.line(run, number, row), highlight=False, soft_wrap=True)

    def skip(self, run: Run, why: str) -> None:
        self.progress.console.print(f"{run.name}  {why}", highlight=False)


@contextmanager
def watcher(experiment: Experiment, score: str) -> Iterator[Watcher]:
    """The one that suits the standard output."""
    console = Console()
    if not console.is_terminal:
        yield Lines(experiment.epochs, score)
        return
    columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        yield Bar(experiment.epochs, score, progress)

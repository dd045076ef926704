"""What the user sees while a run goes on: a bar on a terminal, a line an epoch elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gradwire.tools.train.metrics import Row

REFRESH_SECONDS = 0.2  # reading the loss and the statistics waits for the device


class Reporter(Protocol):
    """Told how far a run has come."""

    def begin(self, title: str, done: int, total: int, epochs: int) -> None: ...

    def due(self) -> bool:
        """Whether `step` would show anything now; asked every step, so that nothing is computed in vain."""
        ...

    def step(self, step: int, epoch: int, loss: float, sent_megabytes: float) -> None: ...

    def epoch(self, row: Row, score: str, sent_megabytes: float) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Shows nothing: the ranks other than 0."""

    def begin(self, title: str, done: int, total: int, epochs: int) -> None: ...

    def due(self) -> bool:
        return False

    def step(self, step: int, epoch: int, loss: float, sent_megabytes: float) -> None: ...

    def epoch(self, row: Row, score: str, sent_megabytes: float) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Lines(Silent):
    """Plain lines, one an epoch or only one at the end: for log files and pipes."""

    def __init__(self, every_epoch: bool) -> None:
        self.every_epoch = every_epoch
        self.title, self.epochs = "", 0

    def begin(self, title: str, done: int, total: int, epochs: int) -> None:
        self.title, self.epochs = title, epochs

    def epoch(self, row: Row, score: str, sent_megabytes: float) -> None:
        if not self.every_epoch and row["epoch"] < self.epochs:
            return
        less = row["dense_bytes"] / row["bytes_sent"] if row["bytes_sent"] else float("inf")
        self.note(
            f"{self.title}  epoch {row['epoch']:.0f}/{self.epochs}  loss {row['train_loss']:.4f}  "
            f"{show(score, row[score])}  {row['bytes_sent'] / 1e6:.2f} MB sent ({less:.1f}x less than float32)  "
            f"{row['ms_per_step']:.1f} ms/step"
        )

    def note(self, text: str) -> None:
        print(text, flush=True)


class Bar:
    """A bar with epoch, loss, score, megabytes and the time left."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.bar = TaskID(0)
        self.epochs = 0
        self.score, self.loss, self.sent_megabytes = "", 0.0, 0.0
        self.next_refresh = 0.0

    def begin(self, title: str, done: int, total: int, epochs: int) -> None:
        self.progress.start()
        self.bar = self.progress.add_task(title, total=total, completed=done, state="")
        self.epochs, self.score = epochs, ""

    def due(self) -> bool:
        return time.monotonic() >= self.next_refresh

    def step(self, step: int, epoch: int, loss: float, sent_megabytes: float) -> None:
        self.loss, self.sent_megabytes = loss, sent_megabytes
        self.refresh(step, epoch)
        self.next_refresh = time.monotonic() + REFRESH_SECONDS

    def refresh(self, step: int, epoch: int) -> None:
        """Draw the last figures known."""
        figures = f"loss {self.loss:.4f}  {self.score}{self.sent_megabytes:.2f} MB sent"
        self.progress.update(self.bar, completed=step, state=f"epoch {epoch}/{self.epochs}  {figures}")

    def epoch(self, row: Row, score: str, sent_megabytes: float) -> None:
        self.score, self.loss = f"{show(score, row[score])}  ", row["train_loss"]
        self.sent_megabytes = sent_megabytes
        self.refresh(int(row["step"]), int(row["epoch"]))

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        self.progress.stop()


def make_reporter(rank: int, every_epoch: bool = True) -> Reporter:
    """The reporter that suits this rank's standard output."""
    if rank != 0:
        return Silent()
    console = Console()
    return Bar(console) if console.is_terminal else Lines(every_epoch)


def show(score: str, value: float) -> str:
    """A score for people: accuracies in percent."""
    if score.endswith("accuracy"):
        return f"{score.replace('_', ' ')} {100 * value:.2f} %"
    return f"{score.replace('_', ' ')} {value:.4f}"

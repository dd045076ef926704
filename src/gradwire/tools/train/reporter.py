"""What the user sees of a training: a bar on a terminal, a line an epoch elsewhere, nothing of ranks other than 0."""

from __future__ import annotations

import time

from rich.progress import TaskID

from gradwire.tools.progress import Bars, show
from gradwire.tools.train.metrics import Row

REFRESH_SECONDS = 0.2  # reading the loss and the statistics waits for the device


class Reporter:
    """Told how far a run has come. every_epoch: a line for each, and not for the last one alone."""

    def __init__(self, rank: int, every_epoch: bool = True) -> None:
        self.speaks, self.every_epoch = rank == 0, every_epoch
        self.bars = Bars(hidden=rank != 0)
        self.bar, self.title, self.epochs = TaskID(0), "", 0
        self.score, self.next_refresh = "", 0.0

    def begin(self, title: str, done: int, total: int, epochs: int) -> None:
        self.bars.start()
        self.bar = self.bars.begin(title, total, done)
        self.title, self.epochs, self.score = title, epochs, ""

    def due(self) -> bool:
        """Whether `step` would show anything now; asked every step, so that nothing is computed in vain."""
        return not self.bars.disable and time.monotonic() >= self.next_refresh

    def step(self, step: int, epoch: int, loss: float, sent_megabytes: float, local_round: str = "") -> None:
        figures = f"{local_round}loss {loss:.4f}  {self.score}{sent_megabytes:.2f} MB sent"
        self.bars.update(self.bar, completed=step, state=f"epoch {epoch}/{self.epochs}  {figures}")
        self.next_refresh = time.monotonic() + REFRESH_SECONDS

    def epoch(self, row: Row, score: str, sent_megabytes: float) -> None:
        self.score = f"{show(score, row[score])}  "
        self.step(int(row["step"]), int(row["epoch"]), row["train_loss"], sent_megabytes)
        if self.bars.disable and (self.every_epoch or row["epoch"] == self.epochs):
            n_bytes = row["bytes_sent"]
            less = row["dense_bytes"] / n_bytes if n_bytes else float("inf")
            self.note(
                f"{self.title}  epoch {row['epoch']:.0f}/{self.epochs}  loss {row['train_loss']:.4f}  {self.score}"
                f"{n_bytes / 1e6:.2f} MB sent ({less:.1f}x less than float32)  {row['ms_per_step']:.1f} ms/step"
            )

    def note(self, text: str) -> None:
        if self.speaks:
            self.bars.line(text)

    def end(self) -> None:
        self.bars.stop()

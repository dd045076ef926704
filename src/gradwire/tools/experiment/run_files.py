"""The files of a run: a row of figures an epoch, elements sent by tensor, and while it is under way its state.

RUN.csv          one row an epoch, with where the figures come from
RUN.layers.csv   one row an epoch: elements that one worker sent a step, a column a tensor
RUN.pt           to go on from; removed when the run is done
.lock            whose run is whose, where several processes share the folder
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradwire.state.durable_files import open_own
from gradwire.tools.experiment.simulated_training import Row
from gradwire.tools.input_errors import InputError
from gradwire.tools.result_files import append, keep, read


class RunFiles:
    """Of one run in one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.figures, self.layers, self.state = (folder / f"{name}{end}" for end in (".csv", ".layers.csv", ".pt"))

    def epochs(self) -> int:
        """How many are written down."""
        return len(read(self.figures))

    def cut(self, epochs: int) -> None:
        """Rows after so many epochs, of a run that stopped later than its last save, are dropped."""
        for path in (self.figures, self.layers):
            keep(path, read(path)[:epochs])

    def add(self, row: Row, sent: dict[str, float], origin: dict[str, str]) -> None:
        """One more row in each; sent: elements a step, by parameter."""
        append(self.figures, {key: f"{value:.8g}" for key, value in row.items()} | origin)
        append(self.layers, {"epoch": f"{row['epoch']:.0f}"} | {name: f"{n:.6g}" for name, n in sent.items()})

    def save(self, state: dict[str, Any]) -> None:
        beside = self.state.with_suffix(".unfinished")
        torch.save(state, beside)
        beside.replace(self.state)

    def load(self) -> dict[str, Any] | None:
        """What was saved, if it is there and the rows up to it too."""
        if not self.state.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.state, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes torch raise
            raise InputError(f"{self.state} cannot be read ({error}): remove it, and the run starts anew") from error
        return state if self.epochs() >= state["epochs"] else None

    def finish(self) -> None:
        self.state.unlink(missing_ok=True)


@contextmanager
def taken(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process has the run to itself; one at a time. The system lets it go however the process ends."""
    with os.fdopen(open_own(folder / ".lock"), "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(name.encode()))
            mine = True
        except (BlockingIOError, PermissionError):
            mine = False
        yield mine

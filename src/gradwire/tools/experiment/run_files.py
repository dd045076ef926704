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
from gradwire.tools.experiment.simulated_training import Epoch
from gradwire.tools.input_errors import InputError
from gradwire.tools.result_files import append, read


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
            rows = read(path)
            if len(rows) > epochs:
                path.unlink()
                for row in rows[:epochs]:
                    append(path, row)

    def add(self, epoch: Epoch, steps: int, origin: dict[str, str]) -> None:
        """One more row in each."""
        append(self.figures, {key: f"{value:.8g}" for key, value in epoch.row.items()} | origin)
        counts = {name: f"{count / steps:.6g}" for name, count in epoch.elements.items()}
        append(self.layers, {"epoch": f"{epoch.row['epoch']:.0f}"} | counts)

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
        except (BlockingIOError, PermissionError):
            mine = False
        else:
            mine = True
        yield mine

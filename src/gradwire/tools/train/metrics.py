"""What a run counts: where it stands, traffic that adds up, one CSV row an epoch, and a summary of the whole."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import gradwire
from gradwire.state.durable_files import write_atomic
from gradwire.tools.result_files import csv_text

if TYPE_CHECKING:
    from gradwire.exchange.counting import Stats
    from gradwire.tools.train.settings import TrainingPlan

Row = dict[str, float]


@dataclass(frozen=True)
class Traffic:
    """Totals over some steps of one worker; the times are sums of milliseconds."""

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    elements: int = 0
    encode_ms: float = 0.0
    exchange_ms: float = 0.0
    decode_ms: float = 0.0

    @staticmethod
    def of(stats: Stats, timed: float) -> Traffic:
        """The totals behind a wire's means; timed: over how many steps, or rounds, those of the times are."""
        return Traffic(
            steps=stats.steps,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            dense_bytes=stats.dense_bytes,
            elements=sum(stats.elements_sent.values()),
            encode_ms=stats.encode_ms * timed,
            exchange_ms=stats.exchange_ms * timed,
            decode_ms=stats.decode_ms * timed,
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def per_step(self, parameters: int) -> Row:
        """What the columns of metrics.csv say about these steps."""
        steps = max(self.steps, 1)
        return {
            "bytes_sent": self.bytes_sent,
            "dense_bytes": self.dense_bytes,
            "ratio": parameters * self.steps / self.elements if self.elements else float("inf"),
            "bits_per_parameter": 8 * self.bytes_sent / (steps * parameters),
            "encode_ms": self.encode_ms / steps,
            "exchange_ms": self.exchange_ms / steps,
            "decode_ms": self.decode_ms / steps,
        }


@dataclass
class RunState:
    """Where a run stands: all that a checkpoint keeps besides tensors."""

    epoch: int = 0  # epochs finished
    step: int = 0
    epoch_step: int = 0
    position: int = 0  # samples of this epoch used by all workers together
    loss_sum: float = 0.0  # over those samples, all workers
    seconds: float = 0.0  # of training in this epoch
    traffic: Traffic = field(default_factory=Traffic)  # of rank 0 in this epoch
    total: Traffic = field(default_factory=Traffic)  # of rank 0 in the epochs before
    rows: list[Row] = field(default_factory=list)

    def next_epoch(self, row: Row) -> None:
        """Close the epoch with its row of metrics."""
        self.rows.append(row)
        self.total += self.traffic
        self.epoch += 1
        self.epoch_step = self.position = 0
        self.loss_sum = self.seconds = 0.0
        self.traffic = Traffic()

    def to_plain(self) -> dict[str, Any]:
        """Numbers, lists and dicts only: what torch.load(weights_only=True) takes."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> RunState:
        traffic, total = Traffic(**plain["traffic"]), Traffic(**plain["total"])
        return RunState(**{**plain, "traffic": traffic, "total": total})


def columns(scores: Sequence[str]) -> list[str]:
    """The columns of metrics.csv. Bytes, ratio and times: of the epoch, of rank 0; `seconds` is training alone."""
    before = ["epoch", "step", "train_loss", *scores, "seconds", "ms_per_step", "workers", "learning_rate"]
    return [*before, *Traffic().per_step(1), "delay"]


def write_csv(path: Path, rows: Sequence[Row], scores: Sequence[str]) -> None:
    """All rows anew, so that a resumed run never leaves a row twice."""
    written = ({key: f"{value:.8g}" for key, value in row.items()} for row in rows)
    write_atomic(path, csv_text(columns(scores), written))


def summarise(plan: TrainingPlan, parameters: int, device: str, state: RunState) -> dict[str, Any]:
    """How the run was started, with what, and how it ended."""
    rows, total = state.rows, state.total + state.traffic
    return {
        "command": shlex.join(["gradwire", *sys.argv[1:]]),
        "finished": len(rows) >= plan.epochs,
        "task": plan.task.name,
        "seed": plan.settings.seed,
        "workers": plan.settings.workers,
        "compressor": plan.exchange,
        "optimizer": plan.settings.optimizer,
        "learning_rate": asdict(plan.schedule),
        "weight_decay": plan.weight_decay,
        "batch": plan.batch,
        "epochs": plan.epochs,
        "parameters": parameters,
        "device": device,
        "versions": {
            "gradwire": gradwire.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "last_epoch": rows[-1] if rows else None,
        "total": {**asdict(total), **total.per_step(parameters)},
        "seconds": sum(row["seconds"] for row in rows),
    }

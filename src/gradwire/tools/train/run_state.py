"""Where a run stands: all that a checkpoint keeps besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.tools.train.metrics import Row, Traffic


@dataclass
class RunState:
    """Counters of the run and of the epoch it is in."""

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

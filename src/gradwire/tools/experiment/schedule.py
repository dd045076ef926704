"""Learning rates over a run, by how much of it is done: a run of fewer epochs has the same schedule, shrunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.tools.input_errors import InputError

KINDS = ("constant", "halving", "cosine")


@dataclass(frozen=True)
class Course:
    """The part of the full learning rate at a point of the run.

    kind: "constant"; "halving", cut in two `times` times at equal distances; "cosine", down to 0.
    warmup: the part of the run in which it rises from 0.
    """

    kind: str = "constant"
    times: int = 0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"schedule: kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.times < 0 or (self.times > 0) != (self.kind == "halving"):
            raise InputError(f'schedule: times is for kind = "halving" and at least 1, got {self.times}')
        if not 0 <= self.warmup < 1:
            raise InputError(f"schedule: warmup is a part of the run, 0 to less than 1, got {self.warmup}")

    def at(self, done: float) -> float:
        """done: 0 at the first step, 1 after the last."""
        if done < self.warmup:
            return done / self.warmup
        if self.kind == "halving":
            return 0.5 ** math.floor(done * self.times + 1e-9)  # 25 of 300 epochs are a twelfth but for rounding
        if self.kind == "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * (done - self.warmup) / (1 - self.warmup))
        return 1.0

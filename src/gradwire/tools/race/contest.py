"""Which runs a race has: a rate, a method and a seed each, and all that they have in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.tools.input_errors import InputError, at_least
from gradwire.tools.lab.rates import MOST_HOSTS, parse_link
from gradwire.tools.race import race_methods
from gradwire.tools.race.score import Score, score_of
from gradwire.tools.train.settings import Settings, TrainingPlan, check


@dataclass(frozen=True)
class RaceRun:
    """One training to a target. None: the task's own."""

    task: str
    hosts: int
    rate: str  # Mbit/s, or as a lab takes it
    method: str
    seed: int
    target: float  # of its score
    optimizer: str = "adam"
    learning_rate: float | None = None
    batch: int | None = None
    every: int = 5  # steps between two tests
    limit_s: float = 600.0
    limit_steps: int = 3000
    data: str = ""

    @property
    def score(self) -> Score:
        return score_of(self.task)

    def key(self) -> dict[str, str]:
        """What a row of results is about, as text: two runs with the same answer are the same run."""
        limits = ("limit_s", "limit_steps", "data")
        return {name: _text(value) for name, value in asdict(self).items() if name not in limits}

    def plan(self) -> TrainingPlan:
        """Checked, with the data open. The compressor in it is not used."""
        return check(
            Settings(
                task=self.task,
                compressor="dense",
                optimizer=self.optimizer,
                workers=self.hosts,
                batch=self.batch,
                learning_rate=self.learning_rate,
                seed=self.seed,
                data=Path(self.data) if self.data else None,
                device="cpu",
            )
        )


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def runs(rates: str, names: str, seeds: Sequence[int], loopback: bool = False, **common: Any) -> list[RaceRun]:
    """Every rate, seed and method; an InputError before anything starts where one of them cannot run."""
    chosen, links = race_methods.split(names), [rate.strip() for rate in rates.split(",") if rate.strip()]
    if not chosen or not links:
        raise InputError("a race needs at least one rate and one method: --rates 10,100 --methods dense,vgc")
    for rate in links:
        parse_link(rate)
    for name in chosen:
        race_methods.parse(name)
    links = ["unshaped"] if loopback else links
    every = itertools.product(dict.fromkeys(links), dict.fromkeys(seeds), dict.fromkeys(chosen))
    found = [RaceRun(rate=rate, method=name, seed=seed, **common) for rate, seed, name in every]
    check_numbers(found[0])
    found[0].plan()
    return found


def check_numbers(run: RaceRun) -> None:
    """Every number in its range; those of a training are checked with its plan."""
    if not 2 <= run.hosts <= MOST_HOSTS:
        raise InputError(f"--hosts {run.hosts}: from 2 to {MOST_HOSTS} can race")
    run.score.check(run.target)
    at_least({"--every": (run.every, 1), "--limit-steps": (run.limit_steps, 1)})
    if not 0 < run.limit_s < float("inf"):
        raise InputError(f"--limit-s must be a positive number of seconds, not {run.limit_s}")

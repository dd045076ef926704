"""One training of an experiment, and a grid of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from gradwire.methods import Compressor, from_spec
from gradwire.tools.input_errors import InputError
from gradwire.tools.train.settings import make_compressor


@dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    method: str
    rate: float  # times the optimizer's learning rate
    seed: int
    front: float = 0.0  # how much more is sent at the beginning: the density falls as exp(-front t / T), its mean stays

    @property
    def name(self) -> str:
        """For people and for files."""
        method = re.sub(r"[^A-Za-z0-9.]+", "-", self.method).strip("-")
        rate = "" if self.rate == 1 else f"-x{self.rate:g}"
        front = f"-front{self.front:g}" if self.front else ""
        return f"{self.optimizer}-{method}{front}{rate}-seed{self.seed}"

    def compressor(self, done: float) -> Compressor:
        """What is used where a part `done` of the run is done."""
        method: Any = from_spec(self.method)
        if not self.front:
            return method  # type: ignore[no-any-return]
        part = self.front / -math.expm1(-self.front) * math.exp(-self.front * done)
        return dataclasses.replace(method, density=min(1.0, float(f"{method.density * part:.4g}")))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Grid:
    """Every combination of these is a run."""

    methods: tuple[str, ...]
    rates: tuple[float, ...] = (1.0,)
    fronts: tuple[float, ...] = (0.0,)  # for methods with a density
    seeds: tuple[int, ...] = (0,)
    optimizers: tuple[str, ...] = ()  # empty: those of the experiment

    def __post_init__(self) -> None:
        for method in self.methods:
            make_compressor(method)
        if not all((self.methods, self.rates, self.fronts, self.seeds)):
            raise InputError("methods, rates, fronts and seeds must each name at least one")
        if any(front < 0 for front in self.fronts):
            raise InputError(f"fronts must be 0 or more, got {list(self.fronts)}")

    def runs(self, optimizers: tuple[str, ...]) -> list[Run]:
        """Of an experiment with these optimizers."""
        every = itertools.product(self.seeds, self.optimizers or optimizers, self.rates, self.fronts, self.methods)
        runs = [Run(optimizer, method, rate, seed, front) for seed, optimizer, rate, front, method in every]
        return [run for run in runs if not run.front or has_density(run.method)]


def has_density(method: str) -> bool:
    return from_spec(method).share is not None

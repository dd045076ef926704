"""An experiment as its file says: a task, methods, optimizers, learning rates and seeds; each combination is a run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.compressors import Compressor, from_spec
from gradwire.experiment.schedule import Course
from gradwire.train import optimizers, tasks
from gradwire.train.errors import InputError
from gradwire.train.settings import make_compressor
from gradwire.train.task import Task

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same by another name
    import tomli as tomllib

PRECISIONS = ("float32", "bf16")


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
class Experiment:
    """What all its runs have in common, and what each of them varies. None: the task's own."""

    task: str
    methods: tuple[str, ...]
    epochs: int
    about: str = ""
    workers: int = 8
    batch: int | None = None
    optimizers: tuple[str, ...] = ("sgd",)
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (1.0,)
    fronts: tuple[float, ...] = (0.0,)  # for methods with a density
    learning_rate: Mapping[str, float] = field(default_factory=dict)  # by optimizer
    weight_decay: float | None = None
    schedule: Mapping[str, Course] = field(default_factory=dict)  # by optimizer; a constant learning rate otherwise
    precision: str = "float32"
    augment: bool = False
    steps_per_epoch: int = 0
    model: Mapping[str, int] = field(default_factory=dict)  # options of the task's network

    def __post_init__(self) -> None:
        kind = tasks.find(self.task)
        for optimizer in self.optimizers:
            optimizers.find(optimizer)
        for method in self.methods:
            make_compressor(method)
        for name, table in {"learning_rate": self.learning_rate, "schedule": self.schedule}.items():
            if unknown := table.keys() - set(self.optimizers):
                raise InputError(f"{name} names {', '.join(sorted(unknown))}, which is not among the optimizers")
        numbers = {"epochs": self.epochs, "workers": self.workers, "batch": self.batch or kind.defaults.batch}
        for name, number in numbers.items():
            if number < 1:
                raise InputError(f"{name} must be 1 or more, not {number}")
        if not all((self.methods, self.optimizers, self.seeds, self.rates)):
            raise InputError("methods, optimizers, seeds and rates must each name at least one")
        if any(front < 0 for front in self.fronts):
            raise InputError(f"fronts must be 0 or more, got {list(self.fronts)}")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")

    @property
    def runs(self) -> list[Run]:
        """Seed by seed, so that one of everything is there first."""
        every = itertools.product(self.seeds, self.optimizers, self.rates, self.fronts, self.methods)
        runs = [Run(optimizer, method, rate, seed, front) for seed, optimizer, rate, front, method in every]
        return [run for run in runs if not run.front or has_density(run.method)]

    def full_rate(self, run: Run) -> float:
        """The highest learning rate of a run."""
        base = self.learning_rate.get(run.optimizer)
        if base is None:
            base = tasks.find(self.task).defaults.schedules[run.optimizer].at(0, self.workers)
        return base * run.rate

    def rate_at(self, run: Run, done: float) -> float:
        """The learning rate where a part `done` of the run is done."""
        return self.full_rate(run) * self.schedule.get(run.optimizer, Course()).at(done)


def has_density(method: str) -> bool:
    return getattr(from_spec(method), "density", None) is not None


def read(path: Path) -> Experiment:
    """The experiment in a file, or an error that says what is wrong in it."""
    if not path.is_file():
        raise InputError(f"{path} is no file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return from_table(content)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"{path}: {error}") from error


def from_table(table: Mapping[str, Any]) -> Experiment:
    """Checks names and types first: a list of one for a single value would otherwise go unnoticed."""
    known = {option.name: option for option in dataclasses.fields(Experiment)}
    unknown = table.keys() - known.keys()
    if unknown:
        raise InputError(f"unknown {', '.join(sorted(unknown))}. Known: {', '.join(known)}")
    missing = {"task", "methods", "epochs"} - table.keys()
    if missing:
        raise InputError(f"{', '.join(sorted(missing))} must be given")
    return Experiment(**{name: _value(name, value) for name, value in table.items()})


NUMBER = (int, float)
LISTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("methods", "optimizers"), str),
    **dict.fromkeys(("rates", "fronts"), NUMBER),
    "seeds": int,
}
SCALARS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("task", "about", "precision"), str),
    **dict.fromkeys(("epochs", "workers", "batch", "steps_per_epoch"), int),
    "weight_decay": NUMBER,
    "augment": bool,
}


def _value(name: str, value: Any) -> Any:
    if name in LISTS:
        if not isinstance(value, list) or not all(_is(one, LISTS[name]) for one in value):
            raise InputError(f"{name} must be a list, got {value!r}")
        return tuple(value)
    if name in SCALARS and not _is(value, SCALARS[name]):
        raise InputError(f"{name} must not be {value!r}")
    if name in ("schedule", "learning_rate", "model") and not isinstance(value, dict):
        raise InputError(f"{name} must be a table, got {value!r}")
    if name != "schedule":
        return value
    try:
        return {optimizer: Course(**course) for optimizer, course in value.items()}
    except TypeError as error:
        raise InputError(
            f"schedule has tables such as [schedule.sgd] of kind, times and warmup, got {value!r}"
        ) from error


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))


def open_task(experiment: Experiment, data: Path | None) -> Task:
    """The task with its data, and the network the experiment asks for."""
    task: Any = tasks.find(experiment.task).open(data)
    sizes = {option.name for option in dataclasses.fields(task) if isinstance(getattr(task, option.name), int)}
    unknown = experiment.model.keys() - sizes
    if unknown:
        known = ", ".join(sorted(sizes)) or "nothing"
        raise InputError(f"model: task {experiment.task} knows no {', '.join(sorted(unknown))}; it knows {known}")
    opened: Task = dataclasses.replace(task, **experiment.model)
    needed = experiment.workers * (experiment.batch or tasks.find(experiment.task).defaults.batch)
    if opened.samples < needed:
        raise InputError(f"a step takes {needed} samples, the data has {opened.samples}")
    return opened

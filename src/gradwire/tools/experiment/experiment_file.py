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
from typing import Any, get_args, get_origin, get_type_hints

from gradwire.local_steps.recipe import Recipe, is_recipe, recipe_of
from gradwire.methods import Compressor, from_spec
from gradwire.tools.input_errors import InputError, at_least
from gradwire.tools.train import optimizers, tasks
from gradwire.tools.train.settings import make_compressor
from gradwire.tools.train.task import Task

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same by another name
    import tomli as tomllib

PRECISIONS = ("float32", "bf16")
SCHEDULES = ("constant", "halving", "cosine")
OUTER = ("outer_lr", "outer_momentum", "decay", "fragments", "delay")  # options of local steps
Outer = tuple[tuple[str, float], ...]  # those that are given, with their values


@dataclass(frozen=True)
class Course:
    """The part of the full learning rate at a point of the run: one of fewer epochs has the same schedule, shrunk.

    kind: "constant"; "halving", cut in two `times` times at equal distances; "cosine", down to 0.
    warmup: the part of the run in which it rises from 0.
    """

    kind: str = "constant"
    times: int = 0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise InputError(f"schedule: kind must be one of {', '.join(SCHEDULES)}, not {self.kind!r}")
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


@dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    method: str
    rate: float  # times the optimizer's learning rate
    seed: int
    front: float = 0.0  # how much more is sent at the beginning: the density falls as exp(-front t / T), its mean stays
    every: int = 0  # inner steps of a round of local steps; 0: as the method says, which without a recipe is none
    outer: Outer = ()

    @property
    def name(self) -> str:
        """For people and for files."""
        method = re.sub(r"[^A-Za-z0-9.]+", "-", self.method).strip("-")
        rate = "" if self.rate == 1 else f"-x{self.rate:g}"
        front = f"-front{self.front:g}" if self.front else ""
        local = f"-H{self.every}" if self.every else ""
        local += "".join(f"-{name}-{value:g}" for name, value in self.outer)
        return f"{self.optimizer}-{method}{front}{local}{rate}-seed{self.seed}"

    @property
    def label(self) -> str:
        """The method, and of local steps what is given beside it."""
        every = f" every={self.every}" if self.every else ""
        return self.method + every + "".join(f" {name}={value:g}" for name, value in self.outer)

    @property
    def is_local(self) -> bool:
        """Whether every worker has an optimizer of its own, and what its steps add up to is exchanged."""
        return self.every > 0 or is_recipe(self.method)

    @property
    def spelt(self) -> Compressor:
        """The method with its options as the file has them."""
        return recipe_of(self.method).compressor if is_recipe(self.method) else from_spec(self.method)

    def compressor(self, done: float) -> Compressor:
        """What is used where a part `done` of the run is done."""
        method: Any = self.spelt
        if not self.front:
            return method  # type: ignore[no-any-return]
        part = self.front / -math.expm1(-self.front) * math.exp(-self.front * done)
        return dataclasses.replace(method, density=min(1.0, float(f"{method.density * part:.4g}")))  # type: ignore[no-any-return]

    def recipe(self) -> Recipe:
        """Of local steps, at the beginning."""
        found = recipe_of(self.method, every=self.every or None, **dict(self.outer))
        return dataclasses.replace(found, method=self.compressor(0.0))


@dataclass(frozen=True)
class Grid:
    """Every combination of these is a run."""

    methods: tuple[str, ...]
    rates: tuple[float, ...] = (1.0,)
    fronts: tuple[float, ...] = (0.0,)  # for methods with a density
    seeds: tuple[int, ...] = (0,)
    optimizers: tuple[str, ...] = ()  # empty: those of the experiment
    every: tuple[int, ...] = (0,)  # inner steps of a round of local steps; 0: gradients are exchanged
    outer_lr: float | None = None  # these of local steps alone; None: as the experiment has it, or the method
    outer_momentum: float | None = None
    decay: float | None = None
    fragments: int | None = None
    delay: int | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            if not is_recipe(method):
                make_compressor(method)
        if not all((self.methods, self.rates, self.fronts, self.seeds, self.every)):
            raise InputError("methods, rates, fronts, seeds and every must each name at least one")
        if any(every < 0 for every in self.every):
            raise InputError(f"every must be 0 or more inner steps, got {list(self.every)}")
        if any(front < 0 for front in self.fronts):
            raise InputError(f"fronts must be 0 or more, got {list(self.fronts)}")

    def runs(self, optimizers: tuple[str, ...], outer: Mapping[str, float]) -> list[Run]:
        """Of an experiment with these optimizers and options of local steps."""
        chosen = {**outer, **given(self)}
        pairs: Outer = tuple((name, chosen[name]) for name in OUTER if name in chosen)
        axes = (self.seeds, self.optimizers or optimizers, self.rates, self.fronts, self.every, self.methods)
        runs = [
            Run(optimizer, method, rate, seed, front, every, pairs if every or is_recipe(method) else ())
            for seed, optimizer, rate, front, every, method in itertools.product(*axes)
        ]
        return [run for run in runs if not run.front or run.spelt.share is not None]


def given(table: Grid | Experiment) -> dict[str, float]:
    """The options of local steps that a table of the file has."""
    return {name: getattr(table, name) for name in OUTER if getattr(table, name) is not None}


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
    clip: float = 0.0  # the largest norm of a mean gradient, with local steps of a worker's own; 0: any
    schedule: Mapping[str, Course] = field(default_factory=dict)  # by optimizer; a constant learning rate otherwise
    precision: str = "float32"
    augment: bool = False
    steps_per_epoch: int = 0
    model: Mapping[str, int] = field(default_factory=dict)  # options of the task's network
    every: tuple[int, ...] = (0,)  # these as a grid has them
    outer_lr: float | None = None
    outer_momentum: float | None = None
    decay: float | None = None
    fragments: int | None = None
    delay: int | None = None
    also: tuple[Grid, ...] = ()  # more runs, of some methods only

    def __post_init__(self) -> None:
        kind = tasks.find(self.task)
        for optimizer in self.every_optimizer:
            optimizers.find(optimizer)
        for name, table in {"learning_rate": self.learning_rate, "schedule": self.schedule}.items():
            if unknown := table.keys() - set(self.every_optimizer):
                raise InputError(f"{name} names {', '.join(sorted(unknown))}, which is not among the optimizers")
        at_least({"epochs": (self.epochs, 1), "workers": (self.workers, 1), "batch": (self.batch or kind.batch, 1)})
        if not 0 <= self.clip < math.inf:
            raise InputError(f"clip must be 0 or more, not {self.clip}")
        if not self.optimizers:
            raise InputError("optimizers must name at least one")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        for run in self.runs:
            _check_recipe(run)

    @property
    def every_optimizer(self) -> tuple[str, ...]:
        """Those that only [[also]] names too."""
        return tuple(dict.fromkeys(name for grid in self.grids for name in grid.optimizers))

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (Grid(self.methods, self.rates, self.fronts, self.seeds, self.optimizers, self.every), *self.also)

    @property
    def runs(self) -> list[Run]:
        """Seed by seed, so that one of everything is there first."""
        runs = dict.fromkeys(run for grid in self.grids for run in grid.runs(self.optimizers, given(self)))
        return sorted(runs, key=lambda run: run.seed)

    def full_rate(self, run: Run) -> float:
        """The highest learning rate of a run."""
        base = self.learning_rate.get(run.optimizer)
        if base is None:
            base = tasks.find(self.task).schedule(run.optimizer).at(0, self.workers)
        return base * run.rate

    def rate_at(self, run: Run, done: float) -> float:
        """The learning rate where a part `done` of the run is done."""
        return self.full_rate(run) * self.schedule.get(run.optimizer, Course()).at(done)


def _check_recipe(run: Run) -> None:
    try:
        if run.is_local:
            run.recipe()
    except ValueError as error:
        raise InputError(f"{run.label}: {error}") from error


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
    return Experiment(**_values(Experiment, table, {"task", "methods", "epochs"}))


def _values(kind: type[Any], table: Mapping[str, Any], needed: set[str]) -> dict[str, Any]:
    known = [option.name for option in dataclasses.fields(kind)]
    if unknown := table.keys() - set(known):
        raise InputError(f"unknown {', '.join(sorted(unknown))}. Known: {', '.join(known)}")
    if missing := needed - table.keys():
        raise InputError(f"{', '.join(sorted(missing))} must be given")
    return {name: _value(kind, name, value) for name, value in table.items()}


def _value(kind: type[Any], name: str, value: Any) -> Any:
    """A value of the type of its field: TOML has no tuples, and a whole number may stand for any number."""
    if name == "also":
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise InputError(f"also is written as [[also]], got {value!r}")
        return tuple(Grid(**_values(Grid, one, {"methods"})) for one in value)
    wanted = get_type_hints(kind)[name]
    if get_origin(wanted) is tuple:
        if not isinstance(value, list) or not all(_is(one, get_args(wanted)[0]) for one in value):
            raise InputError(f"{name} must be a list, got {value!r}")
        return tuple(value)
    if get_origin(wanted) is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{name} must be a table, got {value!r}")
        return _courses(value) if name == "schedule" else value
    if not any(_is(value, one) for one in get_args(wanted) or (wanted,)):
        raise InputError(f"{name} must not be {value!r}")
    return value


def _courses(tables: Mapping[str, Any]) -> dict[str, Course]:
    try:
        return {optimizer: Course(**course) for optimizer, course in tables.items()}
    except TypeError as error:
        raise InputError(
            f"schedule has tables such as [schedule.sgd] of kind, times and warmup, got {tables!r}"
        ) from error


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int if kind is int else (int, float) if kind is float else kind)


def open_task(experiment: Experiment, data: Path | None) -> Task:
    """The task with its data, and the network the experiment asks for."""
    task: Any = tasks.find(experiment.task).open(data)
    sizes = {option.name for option in dataclasses.fields(task) if isinstance(getattr(task, option.name), int)}
    unknown = experiment.model.keys() - sizes
    if unknown:
        known = ", ".join(sorted(sizes)) or "nothing"
        raise InputError(f"model: task {experiment.task} knows no {', '.join(sorted(unknown))}; it knows {known}")
    opened: Task = dataclasses.replace(task, **experiment.model)
    needed = experiment.workers * (experiment.batch or tasks.find(experiment.task).batch)
    if opened.samples < needed:
        raise InputError(f"a step takes {needed} samples, the data has {opened.samples}")
    return opened

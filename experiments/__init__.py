"""The committed results of the experiments in this folder; `python -m experiments` makes docs/results.md of them.

A study is one experiment with one optimizer. A variant is a method, and how its density falls; a setting is a variant
with a learning rate, and has a run a seed.
Only finished runs are read: those with a row for every epoch of the TOML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from gradwire.local_steps.recipe import is_recipe
from gradwire.tools import result_files
from gradwire.tools.experiment import experiment_file, run_files
from gradwire.tools.experiment.experiment_file import Run

FOLDER = Path(__file__).parent
Runs = dict[tuple[str, float, float], list[Run]]  # by method, front and rate


@dataclass(frozen=True)
class Score:
    """How a task is judged; sign: 1 where more is better."""

    column: str
    title: str
    unit: str
    points: str
    scale: float
    digits: int
    sign: int

    def shown(self, value: float) -> str:
        return f"{value:.{self.digits}f} {self.unit}" if math.isfinite(value) else "diverged"


SCORES = (
    Score("test_accuracy", "test accuracy", "%", "points", scale=100, digits=2, sign=1),
    Score("bits_per_byte", "bits per byte", "bits", "bits", scale=1, digits=4, sign=-1),
)


@dataclass(frozen=True)
class History:
    """One finished run, a row an epoch; layers: elements that one worker sent a step, a column a tensor."""

    rows: result_files.Table
    layers: result_files.Table

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows]

    @property
    def score(self) -> Score:
        return next(score for score in SCORES if score.column in self.rows[0])

    @property
    def scores(self) -> list[float]:
        """Epoch by epoch, as shown; what is no number counts as the worst there is."""
        values = (value * self.score.scale for value in self.column(self.score.column))
        return [-self.score.sign * math.inf if math.isnan(value) else value for value in values]

    @property
    def settled(self) -> float:
        """The mean over the last tenth of the epochs: at a constant learning rate one epoch alone says little."""
        return fmean(self.scores[-math.ceil(len(self.rows) / 10) :])

    @property
    def ratio(self) -> float:
        """Of the whole run: parameters x steps / elements, so the epochs' harmonic mean; 1 / inf are no elements."""
        share = fmean(1 / ratio for ratio in self.column("ratio"))
        return 1 / share if share else math.inf


def is_local(method: str) -> bool:
    """Whether a run's label is one of local steps."""
    return " every=" in method or is_recipe(method.partition(" ")[0])


def variant(method: str, front: float) -> str:
    return f"{method} front={front:g}" if front else method


@dataclass(frozen=True)
class Setting:
    """Every figure is the median over the seeds that have finished."""

    method: str
    rate: float
    histories: tuple[History, ...]
    front: float = 0.0

    @property
    def variant(self) -> str:
        return variant(self.method, self.front)

    @property
    def name(self) -> str:
        return self.variant if self.rate == 1 else f"{self.variant} x{self.rate:g}"

    @property
    def kind(self) -> str:
        """The method's name; of local steps another one, as what is compressed is another thing."""
        name = self.method.partition(":")[0].partition(" ")[0].lower()
        return f"{name} local" if is_local(self.method) else name

    @property
    def scores(self) -> list[float]:
        """Of the last epoch, a seed each."""
        return [history.scores[-1] for history in self.histories]

    @property
    def score(self) -> float:
        return median(self.scores)

    @property
    def settled(self) -> float:
        return median(history.settled for history in self.histories)

    @property
    def ratio(self) -> float:
        return median(history.ratio for history in self.histories)

    @property
    def last_ratio(self) -> float:
        return self.typical("ratio", lambda epochs: epochs[-1])

    @property
    def parameters(self) -> float:
        return self.typical("dense_bytes_a_step", lambda epochs: epochs[-1]) / 4

    @property
    def n_bytes(self) -> float:
        """A step, as handed to the collective by one worker: heads, padding and dense steps included."""
        return self.typical("bytes_a_step", fmean)

    @property
    def times_fewer(self) -> float:
        return 4 * self.parameters / self.n_bytes if self.n_bytes else math.inf

    @property
    def train_loss(self) -> float:
        return self.typical("train_loss", lambda epochs: epochs[-1])

    @property
    def delay(self) -> float:
        """Steps that an element waits, in the median epoch."""
        return self.typical("delay", median)

    def typical(self, column: str, of_epochs: Callable[[list[float]], float]) -> float:
        return median(of_epochs(history.column(column)) for history in self.histories)


@dataclass(frozen=True)
class Study:
    """The settings with at least one finished run, in the order of the TOML.

    denses: Dense with and without this optimizer's momentum; the best of them is what all are compared with.
    """

    optimizer: str
    settings: tuple[Setting, ...]
    denses: tuple[Setting, ...]

    @property
    def score(self) -> Score:
        return self.settings[0].histories[0].score

    @property
    def best(self) -> list[Setting]:
        """Of every variant the learning rate with the best score, by the test data, which flatters all alike."""
        variants = dict.fromkeys(setting.variant for setting in self.settings)
        rates = ([setting for setting in self.settings if setting.variant == variant] for variant in variants)
        return [max(found, key=lambda setting: self.score.sign * setting.score) for found in rates]

    @property
    def dense(self) -> Setting | None:
        return max(self.denses, key=lambda setting: self.score.sign * setting.score, default=None)

    def lost(self, setting: Setting) -> float:
        """What a setting is worse than Dense; less than 0 where it is better."""
        return self.score.sign * (self.dense.score - setting.score) if self.dense else math.nan


@dataclass(frozen=True)
class Results:
    """All there is of one TOML."""

    name: str
    plan: experiment_file.Experiment
    finished: dict[Run, History]

    @property
    def studies(self) -> list[Study]:
        every = {optimizer: self._settings(optimizer) for optimizer in self.plan.every_optimizer}
        return [
            Study(optimizer, found, tuple(_denses(found for name, found in every.items() if _alike(name, optimizer))))
            for optimizer, found in every.items()
            if found
        ]

    def _settings(self, optimizer: str) -> tuple[Setting, ...]:
        found = []
        for (method, front, rate), runs in settings(self.plan, optimizer).items():
            if histories := tuple(self.finished[run] for run in runs if run in self.finished):
                found.append(Setting(method, rate, histories, front))
        return tuple(found)

    @property
    def missing(self) -> list[Run]:
        return [run for run in self.plan.runs if run not in self.finished]


def _denses(every: Iterable[Sequence[Setting]]) -> list[Setting]:
    return [setting for found in every for setting in found if setting.kind == "dense"]


def _alike(one: str, other: str) -> bool:
    """Optimizers that are the same but for momentum."""
    first, second = ("sgd" if name == "plain" else name.removeprefix("plain-") for name in (one, other))
    return first == second


def settings(plan: experiment_file.Experiment, optimizer: str) -> Runs:
    """The runs of every (method, front, rate), a seed each: method by method, as the TOML has them.

    A method with its local steps: what is given beside it stands behind it.
    """
    runs = [run for run in plan.runs if run.optimizer == optimizer]
    methods, fronts, rates = (
        list(dict.fromkeys(getattr(run, of) for run in runs)) for of in ("label", "front", "rate")
    )
    found: Runs = {triple: [] for triple in itertools.product(methods, fronts, rates)}
    for run in runs:
        found[run.label, run.front, run.rate].append(run)
    return {triple: of_seeds for triple, of_seeds in found.items() if of_seeds}


def load(folder: Path = FOLDER) -> list[Results]:
    """Every TOML of the folder, with what lies in results/NAME beside it."""
    return [_load(path, folder / "results" / path.stem) for path in sorted(folder.glob("*.toml"))]


def _load(path: Path, folder: Path) -> Results:
    plan, finished = experiment_file.read(path), {}
    for run in plan.runs:
        files = run_files.RunFiles(folder, run.name)
        rows = result_files.read(files.figures)
        if len(rows) == plan.epochs:
            finished[run] = History(rows, result_files.read(files.layers))
    return Results(path.stem, plan, finished)

"""What one run is made of: the settings of the command line, and the checks that come before any process starts."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.errors import AttachError
from gradwire.exchange import budget
from gradwire.exchange.room import Capacity, most_buckets
from gradwire.local_steps.recipe import Recipe
from gradwire.methods import Compressor, from_spec, to_spec
from gradwire.tools.input_errors import InputError, at_least
from gradwire.tools.train import local_options, optimizers, tasks
from gradwire.tools.train.local_options import LocalOptions
from gradwire.tools.train.task import Schedule, Task
from gradwire.tools.train.worker_group import TIMEOUT_S

DEFAULT_WORKERS = 4
LONGEST_S = 1e6  # that one may wait for the others: eleven days
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Settings:
    """The options of `gradwire train`. None and 0 stand for the task's own default, or for no limit."""

    task: str = "digits"
    compressor: str = "vgc"
    optimizer: str = "adam"
    workers: int = DEFAULT_WORKERS
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    seed: int = 0
    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    save_every: int = 0
    steps_per_epoch: int = 0
    device: str = "auto"
    timeout: float = TIMEOUT_S
    max_restarts: int = 0
    local: LocalOptions = field(default_factory=LocalOptions)


@dataclass(frozen=True)
class TrainingPlan:
    """Settings that were checked, with every default filled in and the data open."""

    settings: Settings
    task: Task
    compressor: Compressor
    recipe: Recipe | None  # of local steps; None: gradients are exchanged step by step
    schedule: Schedule
    epochs: int
    batch: int
    weight_decay: float
    out: Path

    @property
    def title(self) -> str:
        return f"{self.settings.task} {local_options.label(self.settings.compressor, self.settings.local)}"

    @property
    def own_momentum(self) -> float:
        """Of the method, in the place of the optimizer's. Local steps keep the optimizer's: it is inside of a round."""
        return self.compressor.own_momentum if self.recipe is None else 0.0

    @property
    def exchange(self) -> str:
        """What goes over the wire, and when, with every option."""
        return repr(self.compressor if self.recipe is None else self.recipe)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with. The number of workers may change, so may the epochs."""
        return {
            "task": self.task.name,
            "data": self.task.fingerprint(),
            "seed": self.settings.seed,
            "compressor": self.exchange,
            "optimizer": self.settings.optimizer,
            "batch": self.batch,
            "learning_rate": asdict(self.schedule),
            "weight_decay": self.weight_decay,
            "steps_per_epoch": self.settings.steps_per_epoch,
        }


def check(settings: Settings) -> TrainingPlan:
    """Fill in the defaults and open the data, or raise an InputError that says what is wrong and what to do."""
    kind = tasks.find(settings.task)
    optimizers.find(settings.optimizer)
    recipe = local_options.find_recipe(settings.compressor, settings.local)
    compressor = make_compressor(settings.compressor) if recipe is None else recipe.compressor
    check_numbers(settings)
    schedule = kind.schedule(settings.optimizer)
    if settings.learning_rate is not None:
        schedule = Schedule(settings.learning_rate, halve_every=schedule.halve_every)
    plan = TrainingPlan(
        settings=settings,
        task=kind.open(settings.data),
        compressor=compressor,
        recipe=recipe,
        schedule=schedule,
        epochs=kind.epochs if settings.epochs is None else settings.epochs,
        batch=kind.batch if settings.batch is None else settings.batch,
        weight_decay=kind.weight_decay if settings.weight_decay is None else settings.weight_decay,
        out=settings.out or default_out(settings),
    )
    check_enough_samples(plan)
    if recipe is None:
        check_budget(plan)
    else:
        local_options.check_model(recipe, plan.task, settings.workers)
    return plan


def make_compressor(spec: str) -> Compressor:
    """The compressor of a specification such as `vgc:alpha=1.5`."""
    try:
        return from_spec(spec)
    except ValueError as error:
        raise InputError(f"--compressor {spec}: {error}") from error


def check_numbers(settings: Settings) -> None:
    """Every number in its range."""
    at_least(
        {
            "--workers": (settings.workers, 1),
            "--epochs": (settings.epochs, 1),
            "--batch": (settings.batch, 1),
            "--seed": (settings.seed, 0),
            "--save-every": (settings.save_every, 0),
            "--steps-per-epoch": (settings.steps_per_epoch, 0),
            "--weight-decay": (settings.weight_decay, 0),
            "--max-restarts": (settings.max_restarts, 0),
        }
    )
    if settings.seed >= 1 << 63:
        raise InputError(f"--seed must be less than 2^63, not {settings.seed}")
    if settings.learning_rate is not None and not 0 < settings.learning_rate < float("inf"):
        raise InputError(f"--learning-rate must be a positive number, not {settings.learning_rate}")
    if not 0 < settings.timeout <= LONGEST_S:
        raise InputError(f"--timeout must be more than 0 seconds and at most {LONGEST_S:g}, not {settings.timeout}")
    check_device(settings.device)
    if settings.resume and settings.overwrite:
        raise InputError("--resume goes on with a run and --overwrite starts it anew: give one of them")


def check_device(name: str) -> None:
    if name not in DEVICES:
        raise InputError(f"unknown device {name!r}. Known devices: {', '.join(DEVICES)}")


def check_enough_samples(plan: TrainingPlan) -> None:
    """An epoch has at least one step of every worker."""
    needed, there = plan.settings.workers * plan.batch, plan.task.samples
    if there < needed:
        raise InputError(
            f"{plan.settings.workers} workers x batch {plan.batch} take {needed} samples a step, "
            f"the data has {there}: fewer --workers, a smaller --batch or more data"
        )


def check_budget(plan: TrainingPlan) -> None:
    """A budget in bytes that the task's network can keep."""
    if (plan.compressor.most_bytes, plan.compressor.most_rate) == (None, None):
        return
    numels = {name: parameter.numel() for name, parameter in plan.task.make_model().named_parameters()}
    n_bytes = 4 * sum(numels.values())
    try:
        budget.check(plan.compressor, Capacity(n_bytes, plan.settings.workers, numels, most_buckets(n_bytes)))
    except AttachError as error:
        raise InputError(f"--compressor {to_spec(plan.compressor)}: {error}") from error


def default_out(settings: Settings) -> Path:
    """runs/<task>-<compressor>-<seed>, in characters that every file system takes."""
    named = local_options.label(settings.compressor, settings.local)
    compressor = re.sub(r"[^A-Za-z0-9.=_]+", "-", named).strip("-")
    return Path("runs") / f"{settings.task}-{compressor}-{settings.seed}"

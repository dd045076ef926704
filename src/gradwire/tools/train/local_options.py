"""Local steps as the command line names them: `--every 30` beside a method, or a recipe as the compressor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gradwire.exchange.room import Capacity
from gradwire.local_steps.error_feedback import with_error_feedback
from gradwire.local_steps.fragments import fragments_of
from gradwire.local_steps.recipe import RECIPES, Recipe, is_recipe, recipe_of, split_spec
from gradwire.plan.model import FLOAT_BYTES
from gradwire.tools.input_errors import InputError
from gradwire.tools.train.task import Task


@dataclass(frozen=True)
class LocalOptions:
    """Options of local steps; None: what the recipe says."""

    every: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    decay: float | None = None
    fragments: int | None = None
    delay: int | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def option(name: str) -> str:
    """As it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def find_recipe(spec: str, options: LocalOptions) -> Recipe | None:
    """What the workers train by; None where they exchange gradients step by step."""
    given = options.given()
    try:
        local = is_recipe(spec)
    except ValueError as error:
        raise InputError(f"--compressor {spec}: {error}") from error
    if not local and not given:
        return None
    if not local and "every" not in given:
        raise InputError(
            f"{option(next(iter(given)))} is of local steps: give --every H too, the steps of a round, or a recipe, "
            f"--compressor {' or '.join(RECIPES)}"
        )
    try:
        return recipe_of(spec, **given)
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        guilty = next((word for word in words if word in given), None)
        named = f"--compressor {spec}" if guilty is None else f"{option(guilty)} {given[guilty]}"
        raise InputError(f"{named}: {error}") from error


def label(spec: str, options: LocalOptions) -> str:
    """The spec with the options of the command line in it: what a run is called."""
    if not options.given():
        return spec
    method, written = split_spec(spec)
    values = ",".join(f"{name}={value}" for name, value in {**written, **options.given()}.items())
    return f"{method}{',' if ':' in method else ':'}{values}"


def check_model(recipe: Recipe, task: Task, workers: int) -> None:
    """Raise where the task's network has too few layers, or too many tensors for a budget."""
    numels = {name: parameter.numel() for name, parameter in task.make_model().named_parameters()}
    try:
        parts = fragments_of(numels, recipe.fragments)
    except ValueError as error:
        raise InputError(f"--fragments {recipe.fragments}: {error}") from error
    if recipe.compressor.most_bytes is None:
        return
    most = recipe.compressor.most_bytes * recipe.every // recipe.fragments
    words = with_error_feedback(recipe.compressor).words
    for part in parts:
        ours = {name: numels[name] for name in part}
        least = Capacity(FLOAT_BYTES * sum(ours.values()), workers, ours).least(words)
        if most < least:
            raise InputError(
                f"--compressor: max_bytes_per_step={recipe.compressor.most_bytes} allows an exchange {most} bytes, and "
                f"the heads of its messages and one element of each of its {len(part)} tensors are {least}"
            )

"""What may race: our methods and recipes by their names, torch's own as `torch:...`, anybody's as `python:...`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.adapters.wire import AUTO
from gradwire.local_steps.recipe import RECIPES, Recipe, is_recipe, recipe_of
from gradwire.methods import METHODS, Compressor, from_spec
from gradwire.tools.input_errors import InputError
from gradwire.tools.race import torch_methods
from gradwire.tools.race.entry import RaceEntry, Sent
from gradwire.tools.race.torch_methods import ONE_BUCKET as ONE_BUCKET
from gradwire.tools.race.torch_methods import TORCH, Alone, Begin


@dataclass(frozen=True)
class Method:
    """`begin` gives a DistributedDataParallel model its way to exchange gradients, or `alone` a plain one local steps.

    Its learning rate is `factor` times the task's.
    """

    name: str
    begin: Begin | None = None
    factor: float = 1.0
    buckets: dict[str, Any] = field(default_factory=dict)  # what DistributedDataParallel is told about them
    momentum: float = 0.0  # in what it holds back
    alone: Alone | None = None

    def enter(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> RaceEntry:
        """Makes the model ready to be trained."""
        if self.alone is not None:
            return self.alone(model, optimizer)
        assert self.begin is not None
        ddp = DistributedDataParallel(model, **self.buckets)
        return RaceEntry(ddp, self.begin(ddp))


def split(text: str) -> list[str]:
    """Methods between commas; a part such as `zeta=0.99` is one more option of the method before it."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def parse(text: str) -> Method:
    """The method a user has named; an InputError where there is none of this name, or an option of it is wrong."""
    spec, at, times = text.partition("@")
    factor = _factor(text, times) if at else 1.0
    kind, _, rest = spec.partition(":")
    if kind == "torch":
        begin, alone, buckets = torch_methods.find(spec, rest)
        return Method(text, begin, factor, buckets, alone=alone)
    if kind == "python":
        function = _function(spec, rest)
        if _takes_optimizer(function):
            return Method(text, factor=factor, alone=partial(_call_alone, spec, function))
        return Method(text, partial(_call, function), factor)
    ours = _ours(spec)
    if isinstance(ours, Recipe):  # its momentum is outside, the optimizer keeps its own
        return Method(text, factor=factor, alone=partial(_local, ours))
    momentum = 0.0 if isinstance(ours, str) else ours.own_momentum  # "auto" has none
    return Method(text, partial(_attach, ours), factor, momentum=momentum)


def _factor(text: str, times: str) -> float:
    try:
        factor = float(times)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise InputError(f"method {text!r}: after @ comes a factor of the learning rate, as in vgc@2")
    return factor


def _ours(spec: str) -> Compressor | Recipe | str:
    try:
        if is_recipe(spec):
            return recipe_of(spec)
        return AUTO if spec == AUTO else from_spec(spec)
    except ValueError as error:
        others = [*RECIPES, *(f"torch:{name}" for name in TORCH), "python:module.function"]
        known = spec.partition(":")[0].lower() in {*METHODS, *RECIPES}
        hint = "" if known else f"; local steps, torch's and anybody's: {', '.join(others)}"
        raise InputError(f"method {spec!r}: {error}{hint}") from error


def _attach(compressor: Compressor | str, model: DistributedDataParallel) -> Sent:
    wire = gradwire.attach(model, compressor)
    return lambda steps: wire.stats().bytes_sent


def _local(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> RaceEntry:
    wire = gradwire.local(model, optimizer, recipe)

    def sent(steps: int) -> int:
        return wire.stats().bytes_sent

    def waited() -> float:
        stats = wire.stats()
        return stats.waited_ms * stats.exchanges / recipe.fragments / 1e3

    return RaceEntry(
        model,
        sent,
        shared=wire.base_weights,
        rests=wire.rests,
        wait=wire.wait,
        warm=wire.finish,
        close=wire.detach,
        waited=waited,
    )


def _function(spec: str, rest: str) -> Callable[..., Any]:
    """Found from the current folder."""
    module, _, name = rest.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"method {spec!r}: write python:module.function, of a module to import ({error})") from error
    if not callable(function):
        raise InputError(f"method {spec!r}: {rest} is no function")
    return function  # type: ignore[no-any-return]


def _takes_optimizer(function: Callable[..., Any]) -> bool:
    """Whether it is called with the plain model and its optimizer, and not with the DistributedDataParallel model."""
    try:
        return "optimizer" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of something written in C
        return False


def _call(function: Callable[..., Any], model: DistributedDataParallel) -> Sent:
    function(model)
    return lambda steps: None


def _call_alone(
    spec: str, function: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> RaceEntry:
    entry = function(model, optimizer)
    if not isinstance(entry, RaceEntry):
        raise InputError(
            f"method {spec!r} takes (model, optimizer) and must return a gradwire.tools.race.entry.RaceEntry"
        )
    return entry

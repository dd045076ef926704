"""What may race: our methods by their names, torch's own as `torch:...`, anybody's as `python:module.function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.adapters.wire import AUTO
from gradwire.methods import METHODS, Compressor, from_spec
from gradwire.plan.model import FLOAT_BYTES
from gradwire.tools.input_errors import InputError

ONE_BUCKET = {"bucket_cap_mb": 1024}

Sent = Callable[[int], int | None]  # bytes handed to the collectives after so many steps; None: nobody counts them
Begin = Callable[[DistributedDataParallel], Sent]


@dataclass(frozen=True)
class Method:
    """`begin` gives a DistributedDataParallel model its way to exchange gradients. Its learning rate is `factor` times
    the task's."""

    name: str
    begin: Begin
    factor: float = 1.0
    buckets: dict[str, Any] = field(default_factory=dict)  # what DistributedDataParallel is told about them
    momentum: float = 0.0  # in what it holds back


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
        begin, buckets = _of_torch(spec, rest)
        return Method(text, begin, factor, buckets)
    if kind == "python":
        return Method(text, partial(_call, _function(spec, rest)), factor)
    compressor = _ours(spec)
    momentum = 0.0 if isinstance(compressor, str) else compressor.own_momentum  # "auto" has none
    return Method(text, partial(_attach, compressor), factor, momentum=momentum)


def _factor(text: str, times: str) -> float:
    try:
        factor = float(times)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise InputError(f"method {text!r}: after @ comes a factor of the learning rate, as in vgc@2")
    return factor


def _ours(spec: str) -> Compressor | str:
    try:
        return AUTO if spec == AUTO else from_spec(spec)
    except ValueError as error:
        others = f"; of torch: {', '.join(f'torch:{name}' for name in TORCH)}; another: python:module.function"
        hint = others if spec.partition(":")[0].lower() not in METHODS else ""
        raise InputError(f"method {spec!r}: {error}{hint}") from error


def _attach(compressor: Compressor | str, model: DistributedDataParallel) -> Sent:
    wire = gradwire.attach(model, compressor)
    return lambda steps: wire.stats().bytes_sent


def _function(spec: str, rest: str) -> Callable[..., Any]:
    """Takes the DistributedDataParallel model and registers a hook; found from the current folder."""
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


def _call(function: Callable[..., Any], model: DistributedDataParallel) -> Sent:
    function(model)
    return lambda steps: None


def _of_torch(spec: str, rest: str) -> tuple[Begin, dict[str, Any]]:
    name, _, options = rest.partition(":")
    if name not in TORCH:
        raise InputError(f"method {spec!r} does not exist. torch's: {', '.join(f'torch:{name}' for name in TORCH)}")
    begin, known, buckets = TORCH[name]
    given = {}
    for option in filter(None, options.split(",")):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in known or not value.isdecimal() or int(value) < 1:
            takes = f"whole numbers from 1 for {', '.join(known)}" if known else "no options"
            raise InputError(f"method {spec!r}: {option!r} is not possible; torch:{name} takes {takes}")
        given[key] = int(value)
    return partial(begin, **given), buckets


def _allreduce(model: DistributedDataParallel) -> Sent:
    """Plain DistributedDataParallel."""
    return lambda steps: steps * FLOAT_BYTES * _size(model)


def _fp16(model: DistributedDataParallel) -> Sent:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return lambda steps: steps * FLOAT_BYTES // 2 * _size(model)


def _powersgd(model: DistributedDataParallel, rank: int = 1, start: int = 2) -> Sent:
    """start: steps of plain all-reduce before it; torch wants at least 2 of them."""
    first = max(2, start)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=first)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def sent(steps: int) -> int:
        plain = min(steps, first)
        return FLOAT_BYTES * (plain * _size(model) + int(state.total_numel_after_compression))

    return sent


def _size(model: DistributedDataParallel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# name: how it begins, its options, its buckets. PowerSGD's later sums of a bucket begin when the first has come, in
# another order on another rank: with more than one bucket it hangs on Gloo.
TORCH: dict[str, tuple[Callable[..., Sent], tuple[str, ...], dict[str, Any]]] = {
    "allreduce": (_allreduce, (), {}),
    "fp16": (_fp16, (), {}),
    "powersgd": (_powersgd, ("rank", "start"), ONE_BUCKET),
}

"""Every method beside what it sends of a real gradient: the table of `gradwire methods`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import METHODS, Compressor, from_spec, to_spec
from gradwire.moments import Recorder
from gradwire.tools.input_errors import InputError
from gradwire.tools.train import digits, optimizers, sharding
from gradwire.tools.train.task import Task

WORKERS = 2
TRAINED = 180  # steps before the first gradient that is looked at: four epochs
SETTLED = 10  # steps in which a method that holds back or asks for room comes to rest
COUNTED = 10  # steps whose bytes are counted
SEED = 0


@dataclass(frozen=True)
class GradientTrace:
    """Gradients and their second moments of all workers, step by step: [step][worker] float32 [N]."""

    layout: Layout
    grads: list[list[Tensor]] = field(default_factory=list)
    moments: list[list[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One method of the table."""

    spec: str
    about: str
    options: str  # all of them, with their values
    paper: str
    bits: float  # a parameter and step


def choose(specs: Sequence[str]) -> list[Compressor]:
    """The methods that the command line names; all of them when it names none."""
    try:
        return [from_spec(spec) for spec in specs or (known.example or name for name, known in METHODS.items())]
    except ValueError as error:
        raise InputError(str(error)) from error


def record(on_step: Callable[[], None] = lambda: None) -> GradientTrace:
    """Trains the digits, uncompressed, and keeps what each worker computed in the last steps."""
    task, kind = digits.open_digits(None), digits.KIND
    torch.manual_seed(SEED)
    model = task.make_model()
    named = dict(model.named_parameters())
    trace = GradientTrace(Layout.of((name, tensor.shape) for name, tensor in named.items()))
    optimizer = optimizers.make("adam", named.values(), kind.adam.base, kind.weight_decay)
    recorder = Recorder(model, named, strict=True)
    of_workers = (sharding.endless(task.samples, SEED, rank, WORKERS, kind.batch) for rank in range(WORKERS))
    steps = zip(range(TRAINED + SETTLED + COUNTED), *of_workers, strict=False)
    for step, *batches in steps:
        pairs = [_look(task, model, recorder, indices) for _, indices in batches]
        mean = torch.stack([grad for grad, _ in pairs]).mean(0)
        for slot in trace.layout:
            named[slot.name].grad = slot.of(mean).view(slot.shape)
        optimizer.step()
        if step >= TRAINED:
            trace.grads.append([grad for grad, _ in pairs])
            trace.moments.append([moment for _, moment in pairs])
        on_step()
    recorder.remove()
    return trace


def _look(task: Task, model: nn.Module, recorder: Recorder, indices: Tensor) -> tuple[Tensor, Tensor]:
    """One worker's gradient and second moment, flat."""
    inputs, targets = task.batch(indices)
    model.zero_grad()
    task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    grads, moments = [], []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad.flatten())
        recorder.consume(name, grads[-1])
        moments.append(recorder.moment(name).flatten())
    return torch.cat(grads), torch.cat(moments)


def measure(compressor: Any, trace: GradientTrace) -> Entry:
    """Sends the trace in one process and counts what a worker hands to the collective, heads and all."""
    ranks = InProcess(compressor, trace.layout, WORKERS, planned=True)
    every = zip(trace.grads, trace.moments, strict=True)
    n_bytes = [ranks(grads, moments).n_bytes for grads, moments in every][-COUNTED:]
    bits = 8 * sum(n_bytes) / len(n_bytes) / trace.layout.numel
    method = type(compressor)
    values = ((option.name, getattr(compressor, option.name)) for option in fields(compressor))
    options = ", ".join(f"{name}={value}".lower() for name, value in values)
    about = (method.__doc__ or "").strip().partition("\n")[0]
    return Entry(to_spec(compressor), about, options, paper_of(method), bits)


def paper_of(method: type[Any]) -> str:
    """The paper that the docstring of a method's module names; a cast has none."""
    found = re.search(r"arXiv:\d{4}\.\d{4,5}", sys.modules[method.__module__].__doc__ or "")
    return found[0] if found else "-"


def table(entries: Sequence[Entry], n_parameters: int) -> Table:
    """One row a method."""
    shown = Table(
        title=f"bits a parameter of a real gradient: digits, {n_parameters:,} parameters, {WORKERS} workers",
        caption=f"Mean of {COUNTED} steps after {TRAINED + SETTLED} of training; handed to the collective by one "
        "worker, heads and padding included. Last line of each: its options, given as vgc:alpha=2,zeta=0.99.",
    )
    shown.add_column("method", overflow="fold")
    shown.add_column("what it sends")
    shown.add_column("paper", no_wrap=True)
    shown.add_column("bits", justify="right", no_wrap=True)
    for entry in entries:
        about = Text.assemble(entry.about, (f"\n{entry.options}" if entry.options else "", "dim"))
        shown.add_row(entry.spec, about, entry.paper, f"{entry.bits:.2f}")
    return shown

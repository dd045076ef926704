"""`gradwire plan`: what a step takes with each method, measured on this link and machine or from given numbers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from typer import Option

from gradwire.local_steps.fragments import fragments_of
from gradwire.local_steps.recipe import Recipe, is_recipe, recipe_of
from gradwire.methods import Compressor, from_spec
from gradwire.plan import typical
from gradwire.plan.choose import choose
from gradwire.plan.model import Network, Work
from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.cli.options import AnyOptimizer, Data
from gradwire.tools.input_errors import InputError
from gradwire.tools.plan import chart
from gradwire.tools.plan.rehearsal import measured
from gradwire.tools.plan.report import PlanReport
from gradwire.tools.train import worker_process
from gradwire.tools.train.launch import launch
from gradwire.tools.train.settings import DEFAULT_WORKERS, Settings, TrainingPlan, check, check_device
from gradwire.tools.train.worker_group import choose_device, inside_torchrun

METHODS = "dense bf16 powersgd:rank=4 topk:density=0.01 vgc:alpha=1.5"
DEFAULT_LATENCY_MS = 0.1
MOST_PARAMETERS = 1e11


@dataclass(frozen=True)
class PlanOutputs:
    """Where the plan goes beside the screen."""

    chart: Path | None
    json: Path | None
    csv: Path | None

    def check(self) -> None:
        if self.chart is not None and (why := chart.refusal(self.chart)):
            raise InputError(f"--chart {why}")
        for option, path in (("--json", self.json), ("--csv", self.csv)):
            if path is not None and not path.absolute().parent.is_dir():
                raise InputError(f"{option} {path}: there is no folder {path.absolute().parent}")

    def show(self, report: PlanReport) -> None:
        """Table, verdict, files."""
        report.show(Console())
        typer.echo(report.verdict.words)
        if self.chart is not None:
            chart.draw(report, self.chart)
        if self.json is not None:
            report.write_json(self.json)
        if self.csv is not None:
            report.write_csv(self.csv)


def plan(
    task: Annotated[
        str | None, Option(help="measure: digits, fashion, cifar10 or text, over workers and link as they are")
    ] = None,
    workers: Annotated[int | None, Option(help="processes on this machine, or those to plan for [4]")] = None,
    methods: Annotated[
        str,
        Option(help="to compare, with a space between them; local steps too: diloco vgc:alpha=0,density=0.03,every=30"),
    ] = METHODS,
    params: Annotated[float | None, Option(help="measure nothing: a model of so many parameters, as in 124e6")] = None,
    backward_ms: Annotated[float | None, Option(help="with --params: a backward takes")] = None,
    forward_ms: Annotated[float | None, Option(help="with --params: all before it takes [half the backward]")] = None,
    after_ms: Annotated[float, Option(help="with --params: the optimizer takes")] = 0.0,
    mbit: Annotated[float | None, Option(help="with --params: of each worker's link, payload; inf: no limit")] = None,
    latency_ms: Annotated[float, Option(help="with --params: of one hop")] = DEFAULT_LATENCY_MS,
    density: Annotated[
        float | None, Option(help="with --params: share of the elements that VGC and its like send [0.01]")
    ] = None,
    margin: Annotated[float, Option(help="a method that loses information must save this share of a step")] = 0.05,
    chart_file: Annotated[Path | None, Option("--chart", help="picture: step time by bandwidth and by workers")] = None,
    json_file: Annotated[Path | None, Option("--json", help="all numbers, measured and predicted")] = None,
    csv_file: Annotated[Path | None, Option("--csv", help="the table")] = None,
    batch: Annotated[int | None, Option(help="samples a worker and step [the task's]")] = None,
    optimizer: AnyOptimizer = "adam",
    data: Data = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Predict the step time of every method, and say which to take. Under torchrun or gradwire lab with --task.

    Local steps, a recipe or a method with every=H, are compared by an inner step on average.
    They change the training, so none is compared that --methods does not name.
    """
    calculation = Calculation(params, backward_ms, forward_ms, after_ms, mbit, latency_ms, density)
    with readable_errors():
        world = among(os.environ if params is None else {}, workers)
        chosen = parse_methods(methods)
        outputs = PlanOutputs(chart_file, json_file, csv_file)
        outputs.check()
        check_given(task, params, device, margin)
        if task is None or params is not None:
            outputs.show(calculation.report(workers, chosen, device, margin))
        else:
            calculation.refuse()
            settings = Settings(task=task, workers=world, batch=batch, optimizer=optimizer, data=data, device=device)
            begin(settings, chosen, margin, outputs)


def check_given(task: str | None, params: float | None, device: str, margin: float) -> None:
    check_device(device)
    if not 0 <= margin < 1:
        raise InputError(f"--margin must be from 0 to 1, not {margin}")
    if (task is None) == (params is None):
        raise InputError("give --task digits to measure, or --params 124e6 --backward-ms 300 --mbit 1000 to calculate")


@dataclass(frozen=True)
class Calculation:
    """A plan for which nothing is measured: what --params comes with. None: not given."""

    params: float | None
    backward_ms: float | None
    forward_ms: float | None
    after_ms: float
    mbit: float | None
    latency_ms: float
    density: float | None

    def refuse(self) -> None:
        """With --task all of these are measured."""
        names = ("backward_ms", "forward_ms", "mbit", "density")
        if given := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]:
            raise InputError(f"{', '.join(given)}: only with --params; with --task they are measured")

    def report(self, workers: int | None, methods: Iterable[str], device: str, margin: float) -> PlanReport:
        needed = {"--backward-ms": self.backward_ms, "--workers": workers, "--mbit": self.mbit}
        if lacking := [option for option, value in needed.items() if value is None]:
            raise InputError(f"--params needs {' and '.join(lacking)} too")
        assert workers is not None and self.mbit is not None  # noqa: PT018 for the type checker
        work, network = self.work(), network_of(workers, self.mbit, self.latency_ms)
        if self.density is not None and not 0 < self.density <= 1:
            raise InputError(f"--density must be more than 0 and at most 1, not {self.density}")
        kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        costs = [typical.cost_of(spec, kind, self.density) for spec in methods]
        return PlanReport(f"typical costs, {kind}", work, network, costs, choose(work, network, costs, margin))

    def work(self) -> Work:
        assert self.params is not None and self.backward_ms is not None  # noqa: PT018 for the type checker
        forward_ms = self.backward_ms / 2 if self.forward_ms is None else self.forward_ms
        times = (forward_ms, self.backward_ms, self.after_ms)
        if not all(0 <= one < math.inf for one in times):
            raise InputError(f"--forward-ms, --backward-ms and --after-ms must be 0 or more, not {times}")
        if not 1 <= self.params <= MOST_PARAMETERS:
            raise InputError(f"--params must be from 1 to {MOST_PARAMETERS:g}, not {self.params:g}")
        return typical.work_of(round(self.params), *times)


def begin(settings: Settings, methods: Mapping[str, Compressor | Recipe], margin: float, outputs: PlanOutputs) -> None:
    """Be a worker, or start them. Everything is checked in both."""
    checked = check(settings)
    check_fragments(checked, methods)
    if inside_torchrun():
        worker_process.run_reporting_errors(lambda: measured(checked, methods, margin, outputs.show))
        return
    choose_device(settings.device, 0, settings.workers)
    launch(settings.workers, sys.argv[1:])


def check_fragments(checked: TrainingPlan, methods: Mapping[str, Compressor | Recipe]) -> None:
    """Every recipe's layers can be exchanged in as many parts as it wants."""
    numels = {name: p.numel() for name, p in checked.task.make_model().named_parameters()}
    for spec, method in methods.items():
        try:
            fragments_of(numels, method.fragments if isinstance(method, Recipe) else 1)
        except ValueError as error:
            raise InputError(f"--methods {spec}: {error}") from error


def among(environment: Mapping[str, str], workers: int | None) -> int:
    """How many workers the plan is for; a rank that is not among them is refused."""
    world = DEFAULT_WORKERS if workers is None else workers
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, started = environment["RANK"], environment["WORLD_SIZE"]
        if not (rank.isdecimal() and started.isdecimal() and int(rank) < int(started)):
            raise InputError(f"RANK is {rank}, which is not in a plan of WORLD_SIZE {started}: ranks go from 0")
        world = int(started)
        if workers is not None and workers != world:
            raise InputError(f"--workers {workers}, but torchrun has started {world}: leave --workers out")
    if world < 2:
        raise InputError(f"{world} worker{'s' if world != 1 else ''} exchange nothing: plan for 2 or more")
    return world


def parse_methods(text: str) -> dict[str, Compressor | Recipe]:
    """By specification, in the order given."""
    found: dict[str, Compressor | Recipe] = {}
    for spec in text.split():
        try:
            found[spec] = recipe_of(spec) if is_recipe(spec) else from_spec(spec)
        except ValueError as error:
            raise InputError(f"--methods {spec}: {error}") from error
    if not found:
        raise InputError(f"--methods names none: as in --methods '{METHODS}'")
    return found


def network_of(workers: int, mbit: float, latency_ms: float) -> Network:
    try:
        return Network(workers, mbit, latency_ms)
    except ValueError as error:
        raise InputError(f"{error}. Give --mbit 1000 for 1 Gbit/s, --latency-ms 0.1") from error

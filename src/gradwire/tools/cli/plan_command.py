"""`gradwire plan`: what a step takes with each method, measured on this link and machine or from given numbers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from typer import Option

from gradwire.methods import Compressor, from_spec
from gradwire.plan import typical
from gradwire.plan.choose import choose
from gradwire.plan.model import Network
from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.input_errors import InputError
from gradwire.tools.plan import chart
from gradwire.tools.plan.report import PlanReport
from gradwire.tools.train.settings import DEFAULT_WORKERS, DEVICES, Settings, check

METHODS = "dense bf16 powersgd:rank=4 topk:density=0.01 vgc:alpha=1.5"
DEFAULT_LATENCY_MS = 0.1
MOST_PARAMETERS = 1e11


@dataclass(frozen=True)
class Outputs:
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

    def write(self, report: PlanReport) -> None:
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
    methods: Annotated[str, Option(help="to compare, with a space between them")] = METHODS,
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
    optimizer: Annotated[
        str, Option(help="adam, adamw, sgd; without momentum: plain-adam, plain-adamw, plain")
    ] = "adam",
    data: Annotated[Path | None, Option(help="cifar10, fashion: folder of the official files; text: any file")] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Predict the step time of every method, and say which to take. Under torchrun or gradwire lab with --task."""
    outputs = Outputs(chart_file, json_file, csv_file)
    with readable_errors():
        world = among(os.environ if params is None else {}, workers)
        chosen = parse_methods(methods)
        outputs.check()
        if device not in DEVICES:
            raise InputError(f"unknown device {device!r}. Known devices: {', '.join(DEVICES)}")
        if not 0 <= margin < 1:
            raise InputError(f"--margin must be from 0 to 1, not {margin}")
        offline = {"--backward-ms": backward_ms, "--forward-ms": forward_ms, "--mbit": mbit, "--density": density}
        if (task is None) == (params is None):
            raise InputError(
                "give --task digits to measure, or --params 124e6 --backward-ms 300 --mbit 1000 to calculate"
            )
        if params is not None:
            needed = {"--backward-ms": backward_ms, "--workers": workers, "--mbit": mbit}
            if lacking := [option for option, value in needed.items() if value is None]:
                raise InputError(f"--params needs {' and '.join(lacking)} too")
            assert backward_ms is not None and mbit is not None  # noqa: PT018 for the type checker
            forward_ms = backward_ms / 2 if forward_ms is None else forward_ms
            times = check_times(forward_ms, backward_ms, after_ms)
            report = calculated(params, times, network_of(world, mbit, latency_ms), chosen, device, density, margin)
            show(report, outputs)
            return
        if given := [option for option, value in offline.items() if value is not None]:
            raise InputError(f"{', '.join(given)}: only with --params; with --task they are measured")
        assert task is not None
        settings = Settings(task=task, workers=world, batch=batch, optimizer=optimizer, data=data, device=device)
        begin(settings, chosen, margin, outputs)


def begin(settings: Settings, methods: Mapping[str, Compressor], margin: float, outputs: Outputs) -> None:
    """Be a worker, or start them. Everything is checked in both."""
    from gradwire.tools.train import worker_process
    from gradwire.tools.train.launch import launch
    from gradwire.tools.train.worker_group import choose_device, inside_torchrun

    checked = check(settings)
    if inside_torchrun():
        from gradwire.tools.plan.measured import measured

        worker_process.run_reporting_errors(
            lambda: measured(checked, methods, margin, lambda report: show(report, outputs))
        )
        return
    choose_device(settings.device, 0, settings.workers)
    launch(settings.workers, sys.argv[1:])


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


def parse_methods(text: str) -> dict[str, Compressor]:
    """By specification, in the order given."""
    found: dict[str, Compressor] = {}
    for spec in text.split():
        try:
            found[spec] = from_spec(spec)
        except ValueError as error:
            raise InputError(f"--methods {spec}: {error}") from error
    if not found:
        raise InputError(f"--methods names none: as in --methods '{METHODS}'")
    return found


def check_times(*times: float) -> tuple[float, float, float]:
    if not all(0 <= one < math.inf for one in times):
        raise InputError(f"--forward-ms, --backward-ms and --after-ms must be 0 or more, not {times}")
    forward, backward, after = times
    return forward, backward, after


def network_of(workers: int, mbit: float, latency_ms: float) -> Network:
    try:
        return Network(workers, mbit, latency_ms)
    except ValueError as error:
        raise InputError(f"{error}. Give --mbit 1000 for 1 Gbit/s, --latency-ms 0.1") from error


def calculated(
    params: float,
    times: tuple[float, float, float],
    network: Network,
    methods: Mapping[str, Compressor],
    device: str,
    density: float | None,
    margin: float,
) -> PlanReport:
    """Nothing is measured: typical costs."""
    if not 1 <= params <= MOST_PARAMETERS:
        raise InputError(f"--params must be from 1 to {MOST_PARAMETERS:g}, not {params:g}")
    if density is not None and not 0 < density <= 1:
        raise InputError(f"--density must be more than 0 and at most 1, not {density}")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    work = typical.work_of(round(params), *times)
    costs = [typical.cost_of(spec, kind, density) for spec in methods]
    return PlanReport(f"typical costs, {kind}", work, network, costs, choose(work, network, costs, margin))


def show(report: PlanReport, outputs: Outputs) -> None:
    """Table, verdict, files."""
    report.show(Console())
    typer.echo(report.verdict.words)
    outputs.write(report)

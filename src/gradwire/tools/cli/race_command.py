"""`gradwire race`: the same training by every method over the same shaped links, timed to the same accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gradwire.tools.cli.exit_codes import FAILED, readable_errors
from gradwire.tools.cli.options import Loopback, Optimizer, Rates
from gradwire.tools.race import contest, events, race_runner
from gradwire.tools.race.plot import draw
from gradwire.tools.race.race_files import RaceFiles

METHODS = "dense,bf16,vgc:alpha=1.5,torch:allreduce,torch:fp16,torch:powersgd:rank=4"


def race(
    task: Annotated[str, Option(help="digits, fashion, cifar10 or text")] = "digits",
    hosts: Annotated[int, Option(help="network namespaces, one worker each")] = 4,
    rates: Rates = "10,100,1000",
    methods: Annotated[
        str,
        Option(
            help="between commas, options too: vgc:alpha=1.5,zeta=0.99,dense are two. Of `gradwire methods`; "
            "local steps: diloco:every=30 or vgc:alpha=0,density=0.03,every=30; torch:allreduce, torch:bf16, "
            "torch:fp16, torch:powersgd:rank=4, torch:postlocalsgd:every=30; python:module.function, called with the "
            "DDP model, or with (model, optimizer). vgc@2: twice the learning rate"
        ),
    ] = METHODS,
    target: Annotated[float, Option(help="test accuracy; of text: bits per byte")] = 0.97,
    seed: Annotated[list[int] | None, Option(help="may be repeated [0]")] = None,
    optimizer: Optimizer = "adam",
    learning_rate: Annotated[float | None, Option(help="of all methods [the task's for the optimizer]")] = None,
    batch: Annotated[int | None, Option(help="samples a host and step [the task's]")] = None,
    every: Annotated[int, Option(help="steps between two tests, whose time is not counted")] = 5,
    limit_s: Annotated[float, Option(help="seconds of training after which a run has not reached the target")] = 600.0,
    limit_steps: Annotated[int, Option(help="steps after which it has not")] = 3000,
    data: Annotated[Path | None, Option(help="cifar10, fashion: folder of the official files; text: any file")] = None,
    out: Annotated[Path, Option(help="folder of race.csv, trace.csv and race.svg")] = Path("race"),
    loopback: Loopback = False,
) -> None:
    """Train TASK by every method over every link until it reaches the target. The same command again goes on."""
    with readable_errors(after_interrupt="The same command goes on with the next run that is not done"):
        common = {"task": task, "hosts": hosts, "target": target, "optimizer": optimizer, "batch": batch}
        limits = {"every": every, "limit_s": limit_s, "limit_steps": limit_steps}
        common |= {"learning_rate": learning_rate, "data": str(data.absolute()) if data else "", **limits}
        runs = contest.runs(rates, methods, seed or [0], loopback, **common)
        events.check_lab(loopback)
        files = RaceFiles(out)
        title = f"{task}, {hosts} hosts, to {runs[0].score.target(target)}"
        with race_runner.RaceTable(runs, title) as seen:
            failures = race_runner.race(runs, files, seen, loopback, f"gradwire race --task {task}")
        lacking = draw(runs, files, out / "race.svg")
        typer.echo(f"results in {out}: race.csv, trace.csv" + (f"; {lacking}" if lacking else ", race.svg"))
        if failures:
            typer.echo("\n".join(f"gradwire: {failure}" for failure in failures), err=True)
            raise typer.Exit(FAILED)

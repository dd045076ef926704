"""`gradwire train`: check the input, then start the workers, or be one of them inside torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.cli.options import Data, Optimizer
from gradwire.tools.input_errors import InputError
from gradwire.tools.train import run_directory, worker_process
from gradwire.tools.train.launch import launch
from gradwire.tools.train.local_options import LocalOptions
from gradwire.tools.train.settings import Settings, TrainingPlan, check
from gradwire.tools.train.worker_group import TIMEOUT_S, choose_device, inside_torchrun


def train(
    task: Annotated[str, Option(help="digits, fashion, cifar10 or text")] = "digits",
    workers: Annotated[int | None, Option(help="processes on this machine; under torchrun leave it out [4]")] = None,
    compressor: Annotated[
        str,
        Option(
            help="one of `gradwire methods`, with options: vgc:alpha=2,zeta=0.99; or a recipe of local steps: diloco"
        ),
    ] = "vgc",
    every: Annotated[int | None, Option(help="local steps: exchange what so many steps add up to")] = None,
    outer_lr: Annotated[float | None, Option(help="local steps: of the step with the workers' mean [1]")] = None,
    outer_momentum: Annotated[float | None, Option(help="local steps: Nesterov's, of that step [0]")] = None,
    decay: Annotated[
        float | None, Option(help="local steps: what remains of what was held back, a round [0.95]")
    ] = None,
    fragments: Annotated[
        int | None, Option(help="local steps: exchange the layers in so many parts, in turn [1]")
    ] = None,
    delay: Annotated[int | None, Option(help="local steps: steps that a sum may be on its way meanwhile [0]")] = None,
    optimizer: Optimizer = "adam",
    epochs: Annotated[int | None, Option(help="[the task's]")] = None,
    batch: Annotated[int | None, Option(help="samples a worker and step [the task's]")] = None,
    learning_rate: Annotated[float | None, Option(help="[the task's for the optimizer]")] = None,
    weight_decay: Annotated[float | None, Option(help="[the task's]")] = None,
    seed: Annotated[int, Option(help="of the initial weights, the order of the samples and dropout")] = 0,
    data: Data = None,
    out: Annotated[Path | None, Option(help="folder of the run [runs/TASK-COMPRESSOR-SEED]")] = None,
    resume: Annotated[bool, Option("--resume", help="go on from the last checkpoint in --out")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="start anew in an --out that holds a run")] = False,
    save_every: Annotated[int, Option(help="save every so many steps too, not only after epochs")] = 0,
    steps_per_epoch: Annotated[int, Option(help="end an epoch after so many steps [all samples]")] = 0,
    device: Annotated[str, Option(help="auto, cpu or cuda; auto takes GPUs when every worker gets one")] = "auto",
    timeout: Annotated[float, Option(help="seconds that a worker waits for the others")] = TIMEOUT_S,
    max_restarts: Annotated[
        int | None, Option(help="start all workers again, from the last checkpoint, when one dies; so often [0]")
    ] = None,
) -> None:
    """Train a task over several workers, with compressed gradients or by local steps; on many machines by torchrun."""
    given: dict[str, Any] = {option: value for option, value in locals().items() if value is not None}
    local = LocalOptions(**{field.name: given.pop(field.name, None) for field in fields(LocalOptions)})
    settings = Settings(**given, local=local)
    if inside_torchrun():
        worker_process.run_reporting_errors(lambda: worker_process.train(check(among_torchrun(settings, workers))))
        return
    with readable_errors(after_interrupt="The same command with --resume goes on from the last checkpoint"):
        start(check(settings))


def start(plan: TrainingPlan) -> None:
    """Look at the folder of the run, then start its workers with the arguments this process was given."""
    found = run_directory.inspect(plan.out, plan.identity(), plan.settings.resume, plan.settings.overwrite)
    if found and found.epoch >= plan.epochs:
        typer.echo(f"{plan.out} has finished its {found.epoch} epochs; --epochs with a larger number goes on")
        return
    if plan.settings.resume and found is None:
        typer.echo(f"nothing is saved in {plan.out} yet: starting at the beginning")
    choose_device(plan.settings.device, 0, plan.settings.workers)
    launch(plan.settings.workers, sys.argv[1:], plan.settings.max_restarts)
    typer.echo(f"results in {plan.out}: metrics.csv, summary.json, checkpoint/")


def among_torchrun(settings: Settings, workers: int | None) -> Settings:
    """The settings with torchrun's number of workers, which must not contradict --workers."""
    world = int(os.environ["WORLD_SIZE"])
    if workers is not None and workers != world:
        raise InputError(f"--workers {workers}, but torchrun has started {world}: leave --workers out under torchrun")
    return replace(settings, workers=world)

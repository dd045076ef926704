"""`gradwire experiment`: all runs of a file, with virtual workers; those that are done are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Argument, Option

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.cli.options import Data
from gradwire.tools.experiment.experiment_file import open_task, read
from gradwire.tools.experiment.run_grid import GridProgress, Runner
from gradwire.tools.train.settings import check_device


def experiment(
    file: Annotated[Path, Argument(help="a TOML file, such as those in experiments/")],
    data: Data = None,
    out: Annotated[Path | None, Option(help="folder of the results [results/NAME beside FILE]")] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    only: Annotated[
        list[str] | None, Option(help="only runs whose name has this in it; more than once: any of them")
    ] = None,
    minutes: Annotated[float, Option(help="stop after so many, to go on later [never]")] = 0.0,
    save_every: Annotated[float, Option(help="seconds between two saves; 0: never")] = 120.0,
) -> None:
    """Run every method, optimizer, learning rate and seed that FILE names. The same command again goes on."""
    with readable_errors(after_interrupt="The same command goes on from the last save"):
        plan = read(file)
        check_device(device)
        where = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # tf32, where float32 is asked for
        task = open_task(plan, data).on(where)
        folder = out or file.parent / "results" / file.stem
        with GridProgress(plan.epochs, task.scores[0]) as seen:
            command = f"gradwire experiment {file.name}" + (" --data DATA" if data else "")
            done = Runner(plan, task, where, folder, seen, save_every, minutes, command)(only or [""])
    typer.echo(f"results in {folder}" + ("" if done else ": not done yet, the same command goes on"))

"""`gradwire demo`: three ways to send a gradient, side by side, in under a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.train import worker_process
from gradwire.tools.train.demo import check_csv, plans, run_demo
from gradwire.tools.train.launch import launch
from gradwire.tools.train.settings import DEFAULT_WORKERS
from gradwire.tools.train.worker_group import inside_torchrun


def demo(
    workers: Annotated[int, Option(help="processes on this machine")] = DEFAULT_WORKERS,
    epochs: Annotated[int | None, Option(help="[the task's]")] = None,
    seed: Annotated[int, Option(help="of the initial weights and the order of the samples")] = 0,
    csv: Annotated[Path | None, Option(help="write the table to this file too, with versions and hardware")] = None,
) -> None:
    """Train the digits with Dense, BF16 and VGC on 4 workers and print one table. No download, under a minute."""
    if inside_torchrun():
        worker_process.run_reporting_errors(lambda: run_demo(plans(workers, epochs, seed), csv))
        return
    with readable_errors():
        plans(workers, epochs, seed)
        check_csv(csv)
        launch(workers, sys.argv[1:])

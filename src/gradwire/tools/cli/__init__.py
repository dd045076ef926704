"""The command line, `gradwire ...`. Thin: one file a command, the work is in the folders beside it."""

from __future__ import annotations

import platform
from typing import Annotated

import torch
import typer

from gradwire.tools.cli.demo_command import demo
from gradwire.tools.cli.experiment_command import experiment
from gradwire.tools.cli.lab_command import lab
from gradwire.tools.cli.methods_command import methods
from gradwire.tools.cli.plan_command import plan
from gradwire.tools.cli.race_command import race
from gradwire.tools.cli.replay_command import replay
from gradwire.tools.cli.train_command import train
from gradwire.version import __version__

app = typer.Typer(
    name="gradwire",
    help="Decides what of a gradient goes over the wire.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they print the locals of every frame, tensors and all
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="show it and end")
    ] = False,
) -> None:
    """Decides what of a gradient goes over the wire."""


app.command()(demo)
app.command()(experiment)
app.command()(lab)
app.command()(methods)
app.command()(plan)
app.command()(race)
app.command()(replay)
app.command()(train)

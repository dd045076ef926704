"""Errors on the command line: one readable message, and an exit code that scripts can tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gradwire.tools.input_errors import USERS
from gradwire.tools.lab import LabError
from gradwire.tools.lab.commands import CommandError
from gradwire.tools.train.launch import WorkerError

REMEDY = "--loopback runs the same processes on 127.0.0.1, unshaped"
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


@contextmanager
def readable_errors(after_interrupt: str = "") -> Iterator[None]:
    """Bad input: the message, exit 2. A failed worker or lab: its error, exit 1. Ctrl-C: what to do then, exit 130.

    A command that has failed in a lab: its own exit code.
    """
    try:
        yield
    except USERS as error:
        typer.echo(f"gradwire: error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except WorkerError as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except LabError as error:
        typer.echo(f"gradwire: {error}\n{REMEDY}", err=True)
        raise typer.Exit(FAILED) from None
    except CommandError as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(error.code) from None
    except KeyboardInterrupt:
        typer.echo(f"gradwire: interrupted. {after_interrupt}".rstrip(), err=True)
        raise typer.Exit(INTERRUPTED) from None

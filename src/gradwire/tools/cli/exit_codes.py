"""Errors on the command line: one readable message, and an exit code that scripts can tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gradwire.tools.input_errors import USERS
from gradwire.tools.train.launch import WorkerError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


@contextmanager
def readable_errors(after_interrupt: str = "") -> Iterator[None]:
    """Bad input: the message, exit 2. A failed worker: its error, exit 1. Ctrl-C: what to do then, exit 130."""
    try:
        yield
    except USERS as error:
        typer.echo(f"gradwire: error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except WorkerError as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        typer.echo(f"gradwire: interrupted. {after_interrupt}".rstrip(), err=True)
        raise typer.Exit(INTERRUPTED) from None

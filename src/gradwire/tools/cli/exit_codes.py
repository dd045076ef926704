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
        return
    except USERS as error:
        said, code = f"error: {error}", BAD_INPUT
    except WorkerError as error:
        said, code = str(error), FAILED
    except LabError as error:
        said, code = f"{error}\n{REMEDY}", FAILED
    except CommandError as error:
        said, code = str(error), error.code
    except KeyboardInterrupt:
        said, code = f"interrupted. {after_interrupt}".rstrip(), INTERRUPTED
    typer.echo(f"gradwire: {said}", err=True)
    raise typer.Exit(code)

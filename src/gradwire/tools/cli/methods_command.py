"""`gradwire methods`: every way to send a gradient, with the bits it takes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.train import method_bits


def methods(
    specs: Annotated[
        list[str] | None,
        typer.Argument(help="only these, with options: vgc:alpha=2 bf16 [all, with their defaults]"),
    ] = None,
) -> None:
    """List the methods: what each sends, its paper, and the bits a parameter measured on a real gradient."""
    with readable_errors():
        chosen = method_bits.choose(specs or [])
        steps = method_bits.TRAINED + method_bits.SETTLED + method_bits.COUNTED
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            training = progress.add_task("training the digits", total=steps)
            trace = method_bits.record(lambda: progress.advance(training))
            sending = progress.add_task("sending its gradients", total=len(chosen))
            entries = []
            for compressor in chosen:
                entries.append(method_bits.measure(compressor, trace))
                progress.advance(sending)
    Console().print(method_bits.table(entries, trace.layout.numel))

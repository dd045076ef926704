"""`gradwire methods`: every way to send a gradient, with the bits it takes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.progress import Bars
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
        with Bars(stderr=True, transient=True) as bars:
            training = bars.begin("training the digits", steps)
            trace = method_bits.record(lambda: bars.advance(training))
            sending = bars.begin("sending its gradients", len(chosen))
            entries = []
            for compressor in chosen:
                entries.append(method_bits.measure(compressor, trace))
                bars.advance(sending)
    Console().print(method_bits.table(entries, trace.layout.numel))

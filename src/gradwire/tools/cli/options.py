"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

AnyOptimizer = Annotated[str, Option(help="adam, adamw, sgd; without momentum: plain-adam, plain-adamw, plain")]
Data = Annotated[Path | None, Option(help="cifar10, fashion: folder of the official files; text: any file")]
Loopback = Annotated[bool, Option("--loopback", help="no root, no rates: all on 127.0.0.1")]
Optimizer = Annotated[
    str,
    Option(help="adam, adamw, sgd (momentum 0.9, unless the method has its own); without: plain-adam[w], plain"),
]
Rates = Annotated[str, Option(help="of the links, between commas: 10,100,1Gbit (Mbit/s)")]

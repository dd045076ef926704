"""The figures of `stats()` in TensorBoard, or anything with its add_scalar."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from gradwire.exchange.counting import Stats, Writer, scalars


def logged(
    stats: Callable[[], Stats],
    writer: Writer,
    every: int,
    prefix: str,
    count: Callable[[], int],
    step: Callable[[], int],
) -> Callable[[], None]:
    """What is to be called whenever `count` has gone up; writes at every `every`-th of it, under the number `step`."""
    if every < 1:
        raise ValueError(f"log_to: every must be at least 1, got {every}")

    def log() -> None:
        if count() % every:
            return
        try:
            for name, value in scalars(stats()).items():
                writer.add_scalar(f"{prefix}/{name}", value, step())
        except Exception as error:  # a full disk must not stop the training of all ranks
            warnings.warn(f"gradwire: the figures could not be logged: {error}", stacklevel=1)

    return log

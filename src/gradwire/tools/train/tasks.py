"""The table of tasks: to add one, write its file and add its row."""

from __future__ import annotations

from gradwire.tools.input_errors import InputError
from gradwire.tools.train import cifar10, digits, fashion, text
from gradwire.tools.train.task import TaskKind

TASKS: dict[str, TaskKind] = {kind.name: kind for kind in (digits.KIND, fashion.KIND, cifar10.KIND, text.KIND)}


def find(name: str) -> TaskKind:
    """The task called `name`, or an error that lists those there are."""
    if name not in TASKS:
        known = ", ".join(f"{kind.name} ({kind.about})" for kind in TASKS.values())
        raise InputError(f"unknown task {name!r}. Known tasks: {known}")
    return TASKS[name]

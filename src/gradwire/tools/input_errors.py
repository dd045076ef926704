"""The errors that are a user's own to mend: the message says what to do, and no traceback is shown."""

from collections.abc import Mapping

from gradwire.errors import AttachError, CheckpointError


class InputError(Exception):
    """Bad input of the command line, found before any worker process starts."""


def at_least(given: Mapping[str, tuple[float | None, float]]) -> None:
    """By name a number and its bound; None is not given. What is no number is refused too."""
    for name, (value, bound) in given.items():
        if value is not None and not value >= bound:
            raise InputError(f"{name} must be {bound} or more, not {value}")


class DamagedRunError(InputError, CheckpointError):
    """The folder of a run is not what was written into it."""


USERS = (InputError, AttachError, CheckpointError)

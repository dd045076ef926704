"""The errors that are a user's own to mend: the message says what to do, and no traceback is shown."""

from gradwire.errors import AttachError, CheckpointError


class InputError(Exception):
    """Bad input of the command line, found before any worker process starts."""


class DamagedRunError(InputError, CheckpointError):
    """The folder of a run is not what was written into it."""


USERS = (InputError, AttachError, CheckpointError)

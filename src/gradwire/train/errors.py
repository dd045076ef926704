"""The one error of the command line: something the user gave is not usable, and the message says what to do."""


class InputError(Exception):
    """Bad input, found before any worker process starts. Shown without a traceback."""

"""The version, for whoever must know it without the package: messages, checkpoints, the command line."""

__version__ = "0.1.0"

"""W workers of one method in one process, as the command line measures them too."""

from gradwire.ranks import CPU, Done, Ranks

__all__ = ["CPU", "Done", "Ranks"]

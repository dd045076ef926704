"""Workers as hosts of their own, on one machine: network namespaces with shaped links, for `gradwire lab` and tests."""

from gradwire.tools.lab.namespaces import Counters, Lab, LabError, clean, missing

__all__ = ["Counters", "Lab", "LabError", "clean", "missing"]

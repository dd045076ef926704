"""Workers as hosts of their own, on one machine: network namespaces with shaped links, for `gradwire lab` and tests."""

from gradwire.tools.lab.iproute import LabError, missing
from gradwire.tools.lab.namespaces import Counters, Lab, clean

__all__ = ["Counters", "Lab", "LabError", "clean", "missing"]

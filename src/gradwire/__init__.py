"""gradwire decides what of a gradient goes over the wire."""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

from gradwire.checkpoint import reshard
from gradwire.compressors import (
    BF16,
    FP8,
    FP16,
    QSGD,
    VGC,
    AdaComp,
    Dense,
    MomentumDCT,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Strom,
    TernGrad,
    TopK,
    from_spec,
)
from gradwire.handle import Wire, attach
from gradwire.moments import per_sample
from gradwire.simulation import Simulation, simulate

if TYPE_CHECKING:
    from gradwire.sharded import load, save

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "QSGD",
    "VGC",
    "AdaComp",
    "Dense",
    "MomentumDCT",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "Simulation",
    "Strom",
    "TernGrad",
    "TopK",
    "Wire",
    "__version__",
    "attach",
    "from_spec",
    "load",
    "per_sample",
    "reshard",
    "save",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """`save` and `load` when they are asked for: torch.distributed.checkpoint takes half a second to import."""
    if name in ("load", "save"):
        from gradwire import sharded

        return getattr(sharded, name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")

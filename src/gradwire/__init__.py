"""gradwire decides what of a gradient goes over the wire."""

from typing import TYPE_CHECKING, Any

from gradwire.adapters.wire import Wire, attach
from gradwire.methods import (
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
from gradwire.moments import per_sample
from gradwire.simulation.simulate import Simulation, simulate
from gradwire.state.checkpoint import reshard
from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire.state.distributed_checkpoint import load, save

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
        from gradwire.state import distributed_checkpoint as sharded

        return getattr(sharded, name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")

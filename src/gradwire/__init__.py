# mypy: implicit-reexport
"""gradwire decides what of a gradient goes over the wire."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradwire.methods.table import METHODS
from gradwire.methods.table import from_spec as from_spec
from gradwire.version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers see: every method of the table, and what _LATER names
    from gradwire.adapters.local_wire import LocalWire as LocalWire
    from gradwire.adapters.local_wire import local as local
    from gradwire.adapters.wire import Wire as Wire
    from gradwire.adapters.wire import attach as attach
    from gradwire.methods.table import *  # noqa: F403
    from gradwire.moments import per_sample as per_sample
    from gradwire.simulation.local_simulation import LocalSimulation as LocalSimulation
    from gradwire.simulation.simulate import Simulation as Simulation
    from gradwire.simulation.simulate import simulate as simulate
    from gradwire.state.checkpoint import reshard as reshard
    from gradwire.state.distributed_checkpoint import load as load
    from gradwire.state.distributed_checkpoint import save as save
else:
    # Imported when they are asked for: nobody pays for what is not used. torch.distributed.checkpoint, behind `save`,
    # takes half a second; a run that needs no second moments never imports the layers.
    _LATER = {
        "LocalSimulation": "gradwire.simulation.local_simulation",
        "LocalWire": "gradwire.adapters.local_wire",
        "Simulation": "gradwire.simulation.simulate",
        "Wire": "gradwire.adapters.wire",
        "attach": "gradwire.adapters.wire",
        "local": "gradwire.adapters.local_wire",
        "load": "gradwire.state.distributed_checkpoint",
        "per_sample": "gradwire.moments",
        "reshard": "gradwire.state.checkpoint",
        "save": "gradwire.state.distributed_checkpoint",
        "simulate": "gradwire.simulation.simulate",
    }
    _METHODS = {known.method.__name__: known.method for known in METHODS.values()}
    globals().update(_METHODS)
    __all__ = sorted(["__version__", "from_spec", *_LATER, *_METHODS])

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
        found = getattr(import_module(_LATER[name]), name)
        globals()[name] = found  # the next time it is there
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

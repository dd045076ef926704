"""The table of methods: one row makes a method known to the package, the command line and the planner.

To add one: its import, by its own name, and its row. `gradwire.NAME` and specs such as `vgc:alpha=1.5` come of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from gradwire.methods.adacomp.definition import AdaComp as AdaComp
from gradwire.methods.base import Compressor, checked
from gradwire.methods.chunk_topk.definition import ChunkTopK as ChunkTopK
from gradwire.methods.dense import BF16 as BF16
from gradwire.methods.dense import FP16 as FP16
from gradwire.methods.dense import Dense as Dense
from gradwire.methods.fp8.definition import FP8 as FP8
from gradwire.methods.momentum_dct.definition import MomentumDCT as MomentumDCT
from gradwire.methods.onebit import OneBit as OneBit
from gradwire.methods.powersgd import PowerSGD as PowerSGD
from gradwire.methods.qsgd.definition import QSGD as QSGD
from gradwire.methods.randomk import RandomK as RandomK
from gradwire.methods.signsgd import SignSGD as SignSGD
from gradwire.methods.strom import Strom as Strom
from gradwire.methods.terngrad.definition import TernGrad as TernGrad
from gradwire.methods.topk.definition import TopK as TopK
from gradwire.methods.vgc import VGC as VGC


@dataclass(frozen=True)
class Typical:
    """What a method takes where nothing is measured: ns an element, or an element sent. Messages: each that is decoded.

    From the committed results:
    - cpu: benchmarks/results/cpu.csv (AMD EPYC, 2 cores). VGC and Strom: encode_cpu, a whole encode to the compact
      format and a whole decode of 8 messages at ratios of 10 to 10,000. All others: methods_cpu, a step of 2,634,762
      parameters on two processes, less the 10 ms that its copy of a backward, DDP and the hand-over take (dense's step
      less its exchange); how that divides into encode and decode is an estimate.
    - cuda: benchmarks/results/gpu.csv (NVIDIA H200). VGC and Strom: encode_gpu. All others: simulate_gpu, what a step
      of 8 workers of 14,987,200 parameters takes more than with dense.
    """

    encode: float
    decode: float = 0.0
    message: float = 0.0
    encode_sent: float = 0.0
    message_sent: float = 0.0


@dataclass(frozen=True)
class Known:
    """A row of the table; without typical costs the planner guesses them, and says so."""

    method: type[Any]
    cpu: Typical | None = None
    cuda: Typical | None = None
    example: str = ""  # a spec, where an option has no default


_CAST, _OTHER = Typical(0.002, 0.0015), Typical(0.02, 0.011)  # what simulate_gpu can tell apart
_SPARSE = (
    Typical(0.9, 0.35, encode_sent=15.0, message_sent=11.0),
    Typical(0.0057, 0.0008, encode_sent=0.03, message_sent=0.013),
)

METHODS: dict[str, Known] = {
    "dense": Known(Dense, Typical(0.03), Typical(0.002)),
    "bf16": Known(BF16, Typical(0.15, 0.1), _CAST),
    "fp16": Known(FP16, Typical(0.5, 0.3), _CAST),
    "fp8": Known(FP8, Typical(2.4, 0.4, message=2.4), _OTHER),
    "adacomp": Known(AdaComp, Typical(4.0, 1.5, message_sent=70.0), _OTHER),
    "chunk_topk": Known(ChunkTopK),
    "momentum_dct": Known(MomentumDCT, Typical(16.0, 8.0), Typical(0.06, 0.028)),
    "onebit": Known(OneBit, Typical(1.5, 0.5, message=0.25), _OTHER),
    "powersgd": Known(PowerSGD, Typical(2.0, 4.0), _OTHER),
    "qsgd": Known(QSGD, Typical(3.5, 1.2, message=0.7), _OTHER),
    "randomk": Known(RandomK, Typical(3.5, 1.7), _OTHER),
    "signsgd": Known(SignSGD, Typical(1.2, 0.4, message=0.25), _OTHER),
    "strom": Known(Strom, *_SPARSE, example="strom:tau=0.01"),
    "terngrad": Known(TernGrad, Typical(5.0, 1.4, message=0.9), _OTHER),
    "topk": Known(TopK, Typical(3.5, 1.0, message_sent=60.0), _OTHER),
    "vgc": Known(VGC, *_SPARSE),
}

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def from_spec(spec: str) -> Compressor:
    """The compressor that `name:option=value,...` names."""
    name, _, rest = spec.strip().partition(":")
    if name.lower() not in METHODS:
        raise ValueError(f"unknown compressor {name!r}; known: {', '.join(METHODS)}")
    method = METHODS[name.lower()].method
    options = parsed(name, rest, {field.name: get_type_hints(method)[field.name] for field in fields(method)})
    for field in fields(method):
        if field.default is MISSING and field.name not in options:
            raise ValueError(f"{name} has no default for {field.name}: write {name.lower()}:{field.name}=value")
    return method(**options)  # type: ignore[no-any-return]


def parsed(name: str, options: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `option=value,...`; known: the type of each option, which may also be None."""
    found: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            takes = f"known: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"unknown option {part.strip()!r} of {name} (write option=value); {takes}")
        if key in found:
            raise ValueError(f"option {key!r} of {name} is given twice")
        found[key] = _parse(f"{name}:{key}", value, known[key])
    return found


def compressor_of(given: Compressor | str) -> Compressor:
    """A compressor, or the one that a spec names."""
    return from_spec(given) if isinstance(given, str) else checked(given)


def to_spec(compressor: Any) -> str:
    """What `from_spec` makes it of: its name, and the options that are not the default. Its repr if it is unknown."""
    name = next((name for name, known in METHODS.items() if type(compressor) is known.method), None)
    if name is None:
        return repr(compressor)
    values = {field: getattr(compressor, field.name) for field in fields(compressor)}
    given = [f"{field.name}={_written(value)}" for field, value in values.items() if value != field.default]
    return f"{name}:{','.join(given)}" if given else name


def _written(value: Any) -> str:
    """A text as it is: Mb is not MB."""
    return value if isinstance(value, str) else str(value).lower()


def _parse(where: str, text: str, kind: Any) -> Any:
    """`text` as the type of the dataclass field, which may also be None."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    if kinds != [kind] and text.lower() == "none":
        return None
    (kind,) = kinds
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{where} cannot be {text!r}: expected {kind.__name__}") from None

"""Compressors by name: `vgc:alpha=1.5,zeta=0.999` on the command line."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from gradwire.methods.adacomp.definition import AdaComp
from gradwire.methods.base import Compressor, checked
from gradwire.methods.bf16 import BF16
from gradwire.methods.dense import Dense
from gradwire.methods.fp8.definition import FP8
from gradwire.methods.fp16 import FP16
from gradwire.methods.momentum_dct.definition import MomentumDCT
from gradwire.methods.onebit import OneBit
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qsgd.definition import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.signsgd import SignSGD
from gradwire.methods.strom import Strom
from gradwire.methods.terngrad.definition import TernGrad
from gradwire.methods.topk.definition import TopK
from gradwire.methods.vgc import VGC

METHODS: dict[str, type[Any]] = {
    "dense": Dense,
    "bf16": BF16,
    "fp16": FP16,
    "fp8": FP8,
    "adacomp": AdaComp,
    "momentum_dct": MomentumDCT,
    "onebit": OneBit,
    "powersgd": PowerSGD,
    "qsgd": QSGD,
    "randomk": RandomK,
    "signsgd": SignSGD,
    "strom": Strom,
    "terngrad": TernGrad,
    "topk": TopK,
    "vgc": VGC,
}

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def from_spec(spec: str) -> Compressor:
    """The compressor that `name:option=value,...` names."""
    name, _, rest = spec.strip().partition(":")
    if name.lower() not in METHODS:
        raise ValueError(f"unknown compressor {name!r}; known: {', '.join(METHODS)}")
    method = METHODS[name.lower()]
    known = {field.name: get_type_hints(method)[field.name] for field in fields(method)}
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            takes = f"known: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"unknown option {part.strip()!r} of {name} (write option=value); {takes}")
        if key in options:
            raise ValueError(f"option {key!r} of {name} is given twice")
        options[key] = _parse(f"{name}:{key}", value, known[key])
    for field in fields(method):
        if field.default is MISSING and field.name not in options:
            raise ValueError(f"{name} has no default for {field.name}: write {name.lower()}:{field.name}=value")
    return method(**options)  # type: ignore[no-any-return]


def compressor_of(given: Compressor | str) -> Compressor:
    """A compressor, or the one that a spec names."""
    return from_spec(given) if isinstance(given, str) else checked(given)


def to_spec(compressor: Any) -> str:
    """What `from_spec` makes it of: its name, and the options that are not the default. Its repr if it is unknown."""
    name = next((name for name, method in METHODS.items() if type(compressor) is method), None)
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
        return BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{where} cannot be {text!r}: expected {kind.__name__}") from None

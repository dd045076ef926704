"""Step 1, moments: who owns which parameter, and what can never be exact; read once, when a recorder is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from gradwire.moments.batch_dim import inner_of
from gradwire.moments.layer_call import path_of
from gradwire.moments.layer_table import Layer, layer_of
from gradwire.moments.layers.own_parameters import BORROWERS, OWN
from gradwire.moments.swapped_forward import is_free

UNKNOWN = "it belongs to a {kind}, which is no layer known here; gradwire.per_sample(param, x) makes a broadcast exact"
NOT_REPORTED = "no use of it in {kind} was reported; gradwire.per_sample(param, x) makes one that is a broadcast exact"
FORMULA = "{kind} has no exact formula; estimator='signs', or two micro-batches and more, estimate it best"
COMPUTED = (
    "{kind} computes its weight from it in a hook before its forward (weight_norm, pruning); as one of "
    "torch.nn.utils.parametrizations it would be exact"
)
CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Owner:
    """One module that holds a parameter under a local name; lineage: itself and its ancestors, the nearest first."""

    module: nn.Module
    name: str
    local: str
    lineage: tuple[nn.Module, ...]

    @property
    def layer(self) -> Layer | None:
        """Its formula, or the forward that watches what it does by itself."""
        if is_parametrized(self.module):
            return OWN
        return layer_of(self.module) or (None if is_torchs(self.module) else OWN)

    @property
    def user(self) -> Owner:
        """Who uses the parameter: this module, or the one that computes its weight of it or borrows it."""
        if isinstance(self.module, ParametrizationList) and len(self.lineage) > 2:
            return self._above(2)
        parent = self.lineage[1] if len(self.lineage) > 1 else None
        borrowed = () if parent is None else BORROWERS.get(path_of(type(parent)), ())
        return self._above(1) if self.name.rpartition(".")[2] in borrowed else self

    def _above(self, levels: int) -> Owner:
        parts = self.name.split(".")
        local = ".".join([*parts[-levels:], self.local])
        return Owner(self.lineage[levels], ".".join(parts[:-levels]), local, self.lineage[levels:])


def is_torchs(module: nn.Module) -> bool:
    """A module that has no forward of someone else's."""
    return type(module).__module__.startswith("torch.nn.") or isinstance(module, CONTAINERS)


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """(name as the user's model has it, without wrappers; module; its lineage) for every module once."""
    known = dict(inner_of(root).named_modules())
    for path, module in known.items():
        parts = path.split(".") if path else []
        above = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        yield (
            ".".join(part for part in parts if part != "_orig_mod"),
            module,
            tuple(known[name] for name in above if name in known),
        )


def owners_of(root: nn.Module) -> dict[int, list[Owner]]:
    """id(parameter) -> the modules that hold it."""
    found: dict[int, list[Owner]] = {}
    for name, module, lineage in modules_of(root):
        for local, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(Owner(module, name, local, lineage).user)
    return found


def why_never(owner: Owner) -> str | None:
    """Why this owner's use can have no exact moment, whatever the caller does; None where it can."""
    layer, kind = owner.layer, path_of(type(owner.module))
    if layer is not None:
        return None if layer is OWN or owner.local in layer.parameters else COMPUTED.format(kind=kind)
    by_torch = type(owner.module).__module__.startswith("torch.nn.modules")
    return FORMULA.format(kind=kind) if by_torch and not isinstance(owner.module, CONTAINERS) else None


def why_raw(owner: Owner) -> str | None:
    """Why no tap sits on this owner, though per_sample could still make its parameter exact."""
    if owner.layer is None or owner.layer is OWN:
        return UNKNOWN.format(kind=path_of(type(owner.module)))
    if not is_free(owner.module):
        return f"the forward of {owner.name!r} was replaced by something else before"
    return None

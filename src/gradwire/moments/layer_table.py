"""Step 1, moments: the table of layers with an exact formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from gradwire.moments.layer_call import LayerCall, path_of
from gradwire.moments.uses import Use

Uses = Iterable[tuple[str, Use]]
Formula = Callable[[Any, Tensor, tuple[Tensor, ...], LayerCall], Uses]
Forward = Callable[..., Any]
F = TypeVar("F", bound=Formula)

# A subclass that overrides one of these computes something else with the same parameters.
COMPUTING = ("forward", "_conv_forward", "_output_padding")


@dataclass(frozen=True)
class Layer:
    """How one class of layer is recorded: its formulas, by part, and its forward where the plain one will not do.

    own_axis: the layer's sample axis where its own definition fixes it. casts: autocast lowers its input.
    """

    formulas: Mapping[str, Formula]
    parameters: Sequence[str] = ("weight", "bias")
    forward: Forward | None = None
    own_axis: int | None = None
    casts: bool = False


LAYERS: dict[str, Layer] = {}


def add(layer: Layer, *kinds: type | str) -> None:
    """Enters a layer by class, or by its path where its library must not be imported."""
    LAYERS.update({kind if isinstance(kind, str) else path_of(kind): layer for kind in kinds})


def register(
    *kinds: type | str, forward: Forward | None = None, own_axis: int | None = None, casts: bool = False
) -> Callable[[F], F]:
    """Enters the formula of a layer with a weight and a bias."""

    def enter(formula: F) -> F:
        add(Layer({"": formula}, forward=forward, own_axis=own_axis, casts=casts), *kinds)
        return formula

    return enter


def layer_of(module: nn.Module) -> Layer | None:
    """The entry for this module, None when its class, or what it computes, is unknown."""
    for base in type(module).__mro__:
        layer = LAYERS.get(path_of(base))
        if layer is None:
            continue
        same = all(getattr(type(module), name, None) is getattr(base, name, None) for name in COMPUTING)
        return layer if same else None
    return None

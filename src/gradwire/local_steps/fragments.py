"""Which layers a round takes, and after which inner step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby


def fragments_of(numels: Mapping[str, int], count: int) -> list[list[str]]:
    """The parameters in `count` runs of about as many elements each; a layer's own stay together.

    numels: elements by name, in the model's order.
    """
    layers = [list(names) for _, names in groupby(numels, key=lambda name: name.rpartition(".")[0])]
    if count > len(layers):
        raise ValueError(f"fragments={count}, and the model has {len(layers)} layers")
    sizes = [sum(numels[name] for name in layer) for layer in layers]
    found: list[list[str]] = [[] for _ in range(count)]
    total, before, current = sum(sizes), 0, 0
    for place, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        wanted = min(count - 1, (2 * before + size) * count // (2 * total)) if total else 0  # where its middle lies
        last = count - (len(layers) - place)  # so that every fragment after it gets a layer
        advanced = current + 1 if found[current] else current
        current = max(min(wanted, advanced), last, current)
        found[current] += layer
        before += size
    return found


def sent_after(step: int, every: int, count: int) -> list[int]:
    """The fragments whose round begins after inner step `step` = 1, 2, ...: in turn, evenly over `every` steps."""
    return [turn % count for turn in range((step - 1) * count // every, step * count // every)]

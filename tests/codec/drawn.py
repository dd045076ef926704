"""What the kernels are compared on: rules, sizes, and gradients over many binades."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.codec import Inputs, Rule, Selection, reference
from gradwire.layout import Layout

RULES = {
    "basic": Rule(1.0, 0.999, None, 0.0, False, "paper"),
    "unbiased": Rule(1.5, 0.9, None, 0.0, True, "unbiased"),
    "hybrid": Rule(2.0, 0.9, 0.1, 0.0, False, "paper"),
    "floor": Rule(1.0, 0.99, None, 0.5, True, "paper"),
}
SIZES = [33, 1, 0, 1500, 31]


def kernels() -> Any:
    from gradwire.codec.gpu import codec

    return codec


def cut_small(device: str, tile: int = 256) -> None:
    """Small tiles in the interpreter, so that a small bucket has several groups; those in use on a GPU."""
    from gradwire.codec.gpu import encode, scores

    if device == "cpu":
        encode.TILE, encode.GROUP, scores.ROWS = tile, 4, 2  # and a group has several programs
        encode.EMIT, encode.EMIT_MANY = encode.EMIT | {"rows": 4}, encode.EMIT_MANY | {"rows": 4}


def layout_of(sizes: list[int]) -> Layout:
    return Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(sizes))


def draw(layout: Layout, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Sizes over many binades, of both signs, with noise that lets half of them pass."""
    generator = torch.Generator().manual_seed(seed)
    one, two, three = (torch.rand(layout.numel, generator=generator) for _ in range(3))
    grad = (one - 0.5) * (two * 9).exp()
    return grad.to(device), (grad.square() * three * 2).to(device)


def messages(
    device: str, rule: Rule, sizes: list[int], share: float, ranks: int, chunk: int
) -> tuple[Layout, tuple[int, ...], list[Selection]]:
    layout, found = layout_of(sizes), []
    capacity = tuple(int(share * size) for size in sizes)
    for rank in range(ranks):
        state = [torch.zeros(layout.numel, device=device) for _ in range(2)]
        found.append(reference.select(Inputs(*draw(layout, rank, device), *state), layout, rule, capacity, rank, chunk))
    return layout, capacity, found

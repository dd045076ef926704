"""Convolutions against torch.func.vmap(grad): dimension, padding and its mode by name, everything else drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from .contract import BATCHES, Case, Draw, tensor
from .layers.test_convolutions import PLAIN, TRANSPOSED
from .test_vmap import Make, compare, drawn


def numbers(draw: Draw, dims: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(dims))


def channels(draw: Draw) -> tuple[int, int, int]:
    """(inputs, outputs, groups): plain, grouped or depthwise."""
    inputs, outputs = numbers(draw, 2, 1, 3)
    choices = [(inputs, outputs, 1), (2 * inputs, 2 * outputs, 2), (inputs + 1, outputs * (inputs + 1), inputs + 1)]
    return draw(st.sampled_from(choices))


def convolution(dims: int, padding: str, mode: str, draw: Draw, batch: int) -> Case:
    inputs, outputs, groups = channels(draw)
    stride = 1 if padding == "same" else numbers(draw, dims, 1, 3)
    given: Any = numbers(draw, dims, 0, 2) if padding == "numbers" else padding
    kernel, dilation = numbers(draw, dims, 1, 3), numbers(draw, dims, 1, 2)
    layer = PLAIN[dims - 1](inputs, outputs, kernel, stride, given, dilation, groups, draw(st.booleans()), mode)
    return Case(layer, (tensor(draw, batch, inputs, *numbers(draw, dims, 5, 6)),), batch)


def transposed(dims: int, draw: Draw, batch: int) -> Case:
    inputs, outputs, groups = channels(draw)
    kernel, stride, padding, dilation = (numbers(draw, dims, *span) for span in ((1, 3), (1, 3), (0, 1), (1, 2)))
    # torch wants less than the stride or the dilation
    extra = tuple(draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation, strict=True))
    layer = TRANSPOSED[dims - 1](inputs, outputs, kernel, stride, padding, extra, groups, draw(st.booleans()), dilation)
    return Case(layer, (tensor(draw, batch, inputs, *numbers(draw, dims, 3, 4)),), batch)


ROWS: dict[str, Make] = {kind.__name__: partial(transposed, dims) for dims, kind in enumerate(TRANSPOSED, 1)}
ROWS |= {
    f"{kind.__name__}, {padding}, {mode}": partial(convolution, dims, padding, mode)
    for dims, kind in enumerate(PLAIN, 1)
    for padding in ("numbers", "same", "valid")
    for mode in ("zeros", "reflect", "replicate", "circular")
}


def examples(name: str) -> int:
    """A plain convolution has twelve rows, a transposed one its only."""
    return 6 if "Transpose" in name else 3


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ROWS)
def test_moment_is_that_of_vmap(name: str, batch: int) -> None:
    drawn(name, ROWS[name], batch, compare, examples(name))


@pytest.mark.parametrize("kind", [kind.__name__ for kind in PLAIN + TRANSPOSED])
def test_the_draws_reach_every_option(kind: str) -> None:
    seen: set[tuple[str, Any]] = set()

    def note(case: Case) -> None:
        layer: Any = case.layer
        depthwise = layer.groups > 2 and layer.groups == layer.in_channels
        seen.update({("groups", "depthwise" if depthwise else layer.groups), ("bias", layer.bias is None)})
        seen.update({("stride", max(layer.stride) > 1), ("dilation", max(layer.dilation) > 1)})
        seen.add(("output_padding", max(layer.output_padding) > 0))

    for name in ROWS:
        if name.split(",")[0] == kind:
            for batch in BATCHES:
                drawn(name, ROWS[name], batch, note, examples(name))
    wanted = {("groups", value) for value in (1, 2, "depthwise")} | {("output_padding", False)}
    wanted |= {(key, value) for key in ("bias", "stride", "dilation") for value in (False, True)}
    assert seen >= wanted | ({("output_padding", True)} if "Transpose" in kind else set())

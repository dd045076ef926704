"""The contract of a layer with a formula: its moment is the sum of its samples' squared gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from .oracle import Labelled, assert_equal, by_sample, recorded

BATCHES = [0, 1, 2, 5]


@dataclass
class Case:
    """One drawn layer with inputs; samples lie along `axis` of the output."""

    layer: nn.Module
    inputs: tuple[Any, ...]
    batch: int
    axis: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-10


Draw = Callable[..., Any]


def tensor(draw: Draw, *shape: int) -> Tensor:
    """Values of both signs; every other one not contiguous."""
    value = torch.randn(*shape, dtype=torch.float64)
    if draw(st.booleans()) and len(shape) > 1:
        return torch.randn(*shape[::-1], dtype=torch.float64).permute(*reversed(range(len(shape))))
    return value


def run(case: Case, reduction: str) -> None:
    root = Labelled(case.layer.double())
    probe = torch.empty(*[1] * case.axis, case.batch)
    share = 1 / max(1, case.batch) if reduction == "mean" else 1.0
    weights: list[Tensor] = []

    def losses() -> list[Tensor]:
        """One a sample: a random linear form and a square, so that gradients differ in sign and in size."""
        output = root(probe, *case.inputs, **case.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if not weights:
            weights.append(torch.randn(output.shape, dtype=torch.float64))
        each = (output * weights[0] + output.square() / 3).movedim(case.axis, 0)
        return [share * sample.sum() for sample in each]

    def whole() -> Tensor:
        found = losses()
        return torch.stack(found).sum() if found else root(probe, *case.inputs, **case.kwargs).sum()

    options = {"batch_dim": case.axis, **case.options}
    wanted = by_sample(root, losses)
    assert_equal(recorded(root, whole, **options), wanted, case.rtol)


def contract(make: Callable[[Draw], Case], reduction: str, examples: int = 4) -> None:
    """Draws shapes for one layer; different ones for each reduction."""

    @settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        torch.manual_seed(data.draw(st.integers(0, 1000)) + 1000 * len(reduction) + (reduction == "mean"))
        run(make(data.draw), reduction)

    check()


def each_batch(make: Callable[[Draw, int], Case], batch: int, reduction: str, examples: int = 2) -> None:
    contract(lambda draw: make(draw, batch), reduction, examples)

"""The contract of EmbeddingBag, every option by name; only ids are drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from ..contract import Case, Draw, contract


@pytest.mark.parametrize("batch", [0, 1, 4])
@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
@pytest.mark.parametrize("padding", [None, 1, 5])
@pytest.mark.parametrize("mode", ["sum", "weighted sum", "mean", "max"])
def test_every_option(mode: str, padding: int | None, form: str, batch: int) -> None:
    weighted = mode == "weighted sum"  # torch weighs only sums

    def make(draw: Draw) -> Case:
        options = {"mode": mode.split()[-1], "padding_idx": padding, "include_last_offset": form == "last offset"}
        layer = nn.EmbeddingBag(6, 3, **options)
        offsets = None
        if form == "2-D":
            ids = torch.randint(0, 6, (batch, draw(st.integers(1, 3))))
        else:
            lengths = torch.tensor([draw(st.integers(0, 3)) for _ in range(batch)], dtype=torch.int64)
            ids = torch.randint(0, 6, (int(lengths.sum()),))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            offsets = offsets if form == "last offset" else offsets[:-1]
        weights = torch.randn(ids.shape, dtype=torch.float64) if weighted else None
        return Case(layer, (ids, offsets, weights), batch)

    contract(make, "sum" if batch % 2 else "mean", 3)


def test_max_takes_the_last_row_for_a_row() -> None:
    """Padding -1 would be the last row."""
    ids = torch.tensor([[5, 5, 1], [5, 5, 5], [2, 5, 3], [0, 1, 5]])
    contract(lambda draw: Case(nn.EmbeddingBag(6, 3, mode="max"), (ids,), 4), "sum", 3)

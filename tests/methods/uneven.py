"""Tensors of all kinds of shapes, and gradients over two decades, for the methods' own tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.layout import Layout

SHAPES: list[tuple[int, ...]] = [(33,), (), (1,), (7, 10), (0,), (4, 3, 3, 3), (20, 31)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
N = LAYOUT.numel


def gradient(step: int, rank: int = 0) -> Tensor:
    random = np.random.default_rng([step, rank])
    return torch.tensor(random.normal(0, 1, N) * 10.0 ** random.uniform(-2, 0, N), dtype=torch.float32)

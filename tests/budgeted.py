"""What the tests of budgets share: a method, a model, and training that counts the bytes of every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

import gradwire
import scenes
from gradwire import VGC

BUDGET = VGC(alpha=0.5, max_bytes_per_step=1500)


def wide(seed: int = 0) -> nn.Sequential:
    """14 thousand parameters in ten tensors."""
    torch.manual_seed(seed)
    first = [nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 100), nn.LayerNorm(100), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 5))


def counted(compressor: Any, n_steps: int, options: dict[str, Any]) -> tuple[list[int], Any, list[str]]:
    """Bytes of every step, the totals, fingerprints; options: DDP's."""
    model = scenes.ddp(wide(), **options)
    wire = gradwire.attach(model, compressor)
    optimizer, n_bytes, prints = scenes.sgd(model), [0], []
    for step in range(n_steps):
        prints += scenes.train(model, range(step, step + 1), optimizer)
        n_bytes.append(wire.stats().bytes_sent)
    return [after - before for before, after in pairwise(n_bytes)], wire.stats(), prints

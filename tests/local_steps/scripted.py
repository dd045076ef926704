"""An inner optimizer whose every change is written down beforehand, and a small model for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def changes(rank: int, step: int, name: str, size: int) -> Tensor:
    """What worker `rank` adds in step 1, 2, ...: half of it is the same on all workers."""
    own = torch.Generator().manual_seed(10_000 * rank + 100 * step + len(name) + size)
    alike = torch.Generator().manual_seed(7 * step + len(name) + size)
    return 0.01 * (torch.randn(size, generator=own) + torch.randn(size, generator=alike))


class Scripted(torch.optim.Optimizer):
    """Looks at no gradient."""

    def __init__(self, net: nn.Module, rank: int) -> None:
        super().__init__(list(net.parameters()), {})
        self.net, self.rank, self.number = net, rank, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        for name, parameter in self.net.named_parameters():
            parameter += changes(self.rank, self.number, name, parameter.numel()).view(parameter.shape)


def small_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 5), nn.Linear(5, 30, bias=False))

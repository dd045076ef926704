"""Trainings by local steps that run inside test workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gradwire
import scenes

Make = Callable[[nn.Module], Any]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def take(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int | None = None) -> float:
    """One inner step on this worker's own batch."""
    x, y = scenes.batch(step, rank)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(method: Any, options: dict[str, Any], steps: int, make: Make = adamw) -> tuple[nn.Module, Any, Any]:
    """A net, its optimizer and its wire after so many inner steps."""
    net = scenes.net(seed=dist.get_rank())  # all begin with the first one's
    optimizer = make(net)
    wire = gradwire.local(net, optimizer, method, **options)
    for step in range(steps):
        take(net, optimizer, step)
    return net, optimizer, wire


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}

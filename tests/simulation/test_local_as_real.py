"""Simulated local steps are what real processes do, bit for bit: elements, bytes, weights, also late and in fragments.

Of methods whose steps are never sums: those of three workers are to rounding, as their order is the ring's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gradwire
import scenes
from workers import Pool

WORKERS, STEPS = 3, 11
RECIPES: dict[str, dict[str, Any]] = {
    "vgc:alpha=0,density=0.1": {"every": 3},
    "vgc:alpha=0,density=0.05": {"every": 2, "outer_momentum": 0.5},
    "topk:density=0.1": {"every": 4, "delay": 2},
    "chunk_topk:chunk=128,k=9": {"every": 3, "fragments": 2, "delay": 1},
    "qsgd": {"every": 3, "fragments": 2},
    "signsgd": {"every": 1},
    "terngrad": {"every": 3, "delay": 2, "mixing": 0.5},
}


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 5))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def real(method: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], int]:
    torch.set_num_threads(1)
    model = net()
    optimizer = adamw(model.parameters())
    wire = gradwire.local(model, optimizer, method, **options)
    for step in range(STEPS):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    own = [p.detach().clone() for p in model.parameters()]
    wire.wait()  # what is on its way counts where it has come
    sent = wire.stats().bytes_sent
    with wire.base_weights():
        base = [p.detach().clone() for p in model.parameters()]
    assert dist.get_world_size() == WORKERS
    return own, base, sent


@pytest.mark.parametrize("method", RECIPES)
def test_bit_for_bit(spawn: Pool, method: str) -> None:
    options, model = RECIPES[method], net()
    torch.set_num_threads(1)
    simulation = gradwire.simulate(
        model, method, lambda net, x, y: F.cross_entropy(net(x), y), workers=WORKERS, optimizer=adamw, **options
    )
    for step in range(STEPS):
        rows = [scenes.batch(step, rank) for rank in range(WORKERS)]
        simulation.step(*(torch.stack(column) for column in zip(*rows, strict=True)))
    found = spawn(WORKERS, real, method, options)
    for rank, (own, base, _) in enumerate(found):
        virtual = list(simulation.replicas[rank].parameters.values())
        for real_one, virtual_one in zip(own, virtual, strict=True):
            assert torch.equal(real_one, virtual_one)
        for real_one, virtual_one in zip(base, model.parameters(), strict=True):
            assert torch.equal(real_one, virtual_one)
    assert found[0][2] == simulation.stats().bytes_sent

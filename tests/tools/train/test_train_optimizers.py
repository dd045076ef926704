"""Where the momentum is, there is one of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire import VGC, Dense, TopK
from gradwire.methods import MomentumDCT
from gradwire.tools.train import optimizers, tasks


@pytest.mark.parametrize("method", [TopK(momentum=0.9), VGC(alpha=0.1, momentum=0.9)], ids=repr)
def test_sgd_has_no_momentum_beside_the_methods(method: TopK | VGC) -> None:
    own = method.own_momentum
    optimizer = optimizers.make("sgd", [nn.Parameter(torch.ones(1))], 0.1, 5e-4, momentum=own)
    assert optimizer.param_groups[0]["momentum"] == 0
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(5e-3)


@pytest.mark.parametrize("method", [Dense(), TopK(), VGC(), MomentumDCT()], ids=repr)
def test_all_others_leave_it_to_sgd(method: object) -> None:
    assert method.own_momentum == 0
    optimizer = optimizers.make("sgd", [nn.Parameter(torch.ones(1))], 0.1, 5e-4)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["weight_decay"] == 5e-4


def test_the_same_decay_in_effect() -> None:
    """Weights without a gradient shrink alike, once the optimizer's momentum has come to what it comes to."""
    weights = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    makers = [
        optimizers.make("sgd", [weight], 0.1, 5e-4, momentum=own)
        for weight, own in zip(weights, (0.0, 0.9), strict=True)
    ]
    for _ in range(2000):
        for weight, optimizer in zip(weights, makers, strict=True):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
    assert weights[0].item() == pytest.approx(weights[1].item(), rel=1e-2)
    assert weights[0].item() < 0.5


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_without_momentum_a_step_of_adam_forgets_the_last_gradient(name: str) -> None:
    """After a gradient of 1 one of 0: plain stands still, the other goes on."""
    moved = {}
    for kind in (name, f"plain-{name}"):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = optimizers.make(kind, [weight], 0.1, 0.0)
        for gradient in (1.0, 0.0):
            before = weight.item()
            weight.grad = torch.full((1,), gradient)
            optimizer.step()
        moved[kind] = before - weight.item()
    assert moved[f"plain-{name}"] == 0
    assert moved[name] > 0.01


def test_every_task_has_a_learning_rate_for_every_family_of_optimizers() -> None:
    family = {
        "adam": "adam",
        "adamw": "adam",
        "plain-adam": "adam",
        "plain-adamw": "adam",
        "plain": "sgd",
        "sgd": "sgd",
    }
    assert family.keys() == optimizers.OPTIMIZERS.keys()
    for kind in tasks.TASKS.values():
        assert all(kind.schedule(name) is getattr(kind, family[name]) for name in family)

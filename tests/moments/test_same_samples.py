"""Two forward passes before one backward: a Siamese net's are of the same samples, and add up before the square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.moments import Recorder

from .oracle import assert_equal, by_sample, consume_all, recorded, trainable


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def contrastive(one: Tensor, other: Tensor) -> Tensor:
    """Near the twin, away from the origin: a value for each sample."""
    one, other = one.flatten(1), other.flatten(1)
    return (one - other).square().sum(1) + (2 - one.norm(dim=1)).relu().square()


class Tied(nn.Module):
    """An embedding that is also the head: four uses in two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, 2), nn.GroupNorm(2, 4), nn.ReLU(True), nn.Flatten(), nn.Linear(16, 3))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)


NETS: dict[str, Any] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)), lambda: floats(5, 4)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: floats(5, 3, 4)),
    "convolutions": (convolutions, lambda: floats(5, 2, 6, 6)),
    "attention": (attention, lambda: floats(5, 3, 8)),
    "embedding and head": (Tied, lambda: torch.randint(0, 7, (5, 4))),
}


@pytest.mark.parametrize("name", NETS)
def test_a_siamese_net_is_exact(name: str) -> None:
    torch.manual_seed(0)
    make, draw = NETS[name]
    net, one, other = make().double(), draw(), draw()

    def losses() -> list[Tensor]:
        return [contrastive(net(one[b : b + 1]), net(other[b : b + 1])).sum() / len(one) for b in range(len(one))]

    found = recorded(net, lambda: contrastive(net(one), net(other)).mean())
    assert_equal(found, by_sample(net, losses))


def test_twins_that_cancel_have_no_moment() -> None:
    """Taken for separate samples they have: the fault is as large as you like."""
    net, x = nn.Linear(4, 3, bias=False).double(), floats(5, 4)
    assert float(recorded(net, lambda: (net(x) - net(x)).sum())["weight"].max()) == 0
    assert float(recorded(net, lambda: (net(x) - net(x)).sum(), same_samples=False)["weight"].max()) > 0.1


def test_passes_of_other_shapes_on_the_same_samples() -> None:
    """Views of one picture in two sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double()
    one, other = floats(4, 2, 6, 6), floats(4, 2, 4, 4)
    wanted = by_sample(net, lambda: [contrastive(net(one[b : b + 1]), net(other[b : b + 1])).sum() for b in range(4)])
    assert_equal(recorded(net, lambda: contrastive(net(one), net(other)).sum()), wanted)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,i->...i", x, self.scale)  # a product would be exact


def moment_of(run: Callable[[nn.Module, Tensor, Tensor], Tensor], estimator: str, micro_batches: int) -> Tensor:
    torch.manual_seed(0)
    net = Scaled()
    recorder = Recorder(net, trainable(net), estimator=estimator)
    for _ in range(2):
        net.zero_grad()
        for _ in range(micro_batches):
            run(net, torch.randn(6, 4), torch.randn(6, 4)).backward()
        consume_all(recorder)
    recorder.remove()
    return recorder.moment("scale").clone()


@pytest.mark.parametrize(("estimator", "micro_batches"), [("groups", 3), ("signs", 1)])
def test_estimates_count_the_samples_once(estimator: str, micro_batches: int) -> None:
    """Two passes give the estimate of one pass whose output is both."""
    apart = moment_of(lambda net, one, other: contrastive(net(one), net(other)).mean(), estimator, micro_batches)
    at_once = moment_of(
        lambda net, one, other: contrastive(*net(torch.stack([one, other], 1)).unbind(1)).mean(),
        estimator,
        micro_batches,
    )
    torch.testing.assert_close(apart, at_once)

"""A parameter used more than once in a pass: its uses are on the same samples, so their cross terms count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments import Recorder

from .oracle import assert_equal, by_sample, recorded, trainable


class LinearTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Loop(nn.Module):
    """One Linear for every step of a loop, as a recurrent network would."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + self.norm(self.cell(x).tanh())
        return x


class TiedHead(nn.Module):
    """Token embedding and output head are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)).tanh())


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * self.table(ids.flip(1)).tanh()


class ConvReused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).tanh())


class Attends(nn.Module):
    """Cross attention and self attention through one module: slices of in_proj used once and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(x, x, x)
        x, _ = self.attention(x.flip(1), x, x)
        return self.attention(x, x.flip(1), x.cos())[0]


class Unreached(nn.Module):
    """One use is computed and thrown away: it never reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x * 3)
        return self.layer(x)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


NETS: dict[str, Any] = {
    "Linear twice": (LinearTwice, lambda: floats(5, 4)),
    "Linear twice, positions": (LinearTwice, lambda: floats(5, 3, 4)),
    "a loop": (Loop, lambda: floats(5, 4)),
    "embedding and head": (TiedHead, lambda: torch.randint(0, 6, (5, 7))),
    "embedding twice": (TwoTables, lambda: torch.randint(0, 6, (5, 7))),
    "convolution reused": (ConvReused, lambda: floats(4, 2, 5, 5)),
    "attention reused": (Attends, lambda: floats(3, 5, 4)),
    "one use unreached": (Unreached, lambda: floats(5, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_cross_terms_of_all_uses_count(name: str) -> None:
    torch.manual_seed(0)
    kind, draw = NETS[name]
    net, x = kind().double(), draw()

    def losses() -> list[Tensor]:
        return [net(x[b : b + 1]).square().sum() / len(x) for b in range(len(x))]

    assert_equal(recorded(net, lambda: net(x).square().sum() / len(x)), by_sample(net, losses))


def test_dropping_cross_terms_would_be_seen() -> None:
    """The test above can fail: the sum of the two uses' own moments is far from the truth."""
    torch.manual_seed(0)
    net, x = LinearTwice().double(), floats(5, 4)
    apart = LinearTwice().double()
    apart.b.weight, apart.b.bias = nn.Parameter(net.a.weight.clone()), nn.Parameter(net.a.bias.clone())
    apart.a = net.a
    truth = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(5)])["a.weight"]
    uses = by_sample(apart, lambda: [apart(x[b : b + 1]).square().sum() for b in range(5)])
    assert not torch.allclose(uses["a.weight"] + uses["b.weight"], truth, rtol=0.05)


def test_a_use_outside_the_module_is_noticed() -> None:
    """F.linear on a layer's weight passes every tap by: the recorded uses no longer add up to the gradient."""
    net, x = nn.Linear(4, 4), torch.randn(5, 4)
    recorder = Recorder(net, trainable(net))
    F.linear(net(x), net.weight).square().sum().backward()
    rows = {row.name: row for row in recorder.coverage()}
    assert rows["weight"].kind == "step"
    assert "also used outside its module" in rows["weight"].why
    assert rows["bias"].kind == "exact"
    recorder.consume("weight", net.weight.grad.reshape(-1))
    torch.testing.assert_close(recorder.moment("weight"), net.weight.grad.square())


def test_a_use_outside_the_module_is_noticed_though_the_first_gradient_was_zero() -> None:
    """A gate that starts at zero: the first gradients say nothing."""
    net, x = nn.Linear(4, 4), torch.randn(5, 4)
    recorder = Recorder(net, trainable(net))
    for gate in (0.0, 1.0):
        net.zero_grad()
        (gate * F.linear(net(x), net.weight)).pow(2).add(gate).square().sum().backward()
    assert "also used outside its module" in {row.name: row for row in recorder.coverage()}["weight"].why
    recorder.remove()


def test_a_gradient_of_rounding_only_is_no_doubt() -> None:
    """A key's bias moves no softmax: its gradient is rounding, and its uses cannot add up to it."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    net = Attention()
    recorder = Recorder(net, trainable(net))
    for _ in range(5):
        net.zero_grad()
        net(torch.randn(6, 9, 8)).square().mean().backward()
        assert {row.kind for row in recorder.coverage()} == {"exact"}

"""Parameters that a module uses by itself, outside any layer, against single samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from gradwire.moments import Recorder

from ..oracle import assert_equal, by_sample, recorded, trainable

BATCH, LENGTH, WIDTH = 3, 4, 6
Does = Callable[[Any, Tensor], Tensor]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Own(nn.Module):
    """A module with parameters `a` and `b` and the forward it is given."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Tensor], a: nn.Parameter, b: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.a, self.b, self.does = a, b, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def scaled_in_place(own: Own, x: Tensor) -> Tensor:
    x = x * 2
    x *= own.a
    return x.add_(own.b)


def with_token(own: Own, x: Tensor) -> Tensor:
    """A class token in front, then positions of as many as there are."""
    x = torch.cat([own.a.expand(x.shape[0], -1, -1), x], 1)
    return x + own.b[:, : x.shape[1]]


def root_mean_square(own: Own, x: Tensor) -> Tensor:
    return own.a * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)).to(x.dtype)


def by_time(own: Own, x: Tensor) -> Tensor:
    return (own.a * x.transpose(0, 1) + own.b[:, None]).transpose(0, 1)


def folded(own: Own, x: Tensor) -> Tensor:
    """Rows of several samples along one axis, as in swin's windows."""
    return (x.flatten(0, 1) * own.a + own.b).unflatten(0, x.shape[:2])


def relative(own: Own, x: Tensor) -> Tensor:
    """swin's and T5's: a table, looked up by a buffer, and turned, added to what has samples."""
    places = torch.arange(LENGTH)
    bias = own.a[places[:, None] - places[None] + LENGTH - 1].permute(2, 0, 1)[None]
    scores = (x @ x.transpose(1, 2))[:, None] + bias.exp()
    return scores.softmax(-1).sum(1) @ x


CASES: dict[str, tuple[Does, tuple[int, ...], tuple[int, ...] | None]] = {
    "scale": (lambda own, x: x * own.a, (WIDTH,), None),
    "scale, from the left": (lambda own, x: own.a * x - own.b, (LENGTH, 1), (1, 1, WIDTH)),
    "divisor": (lambda own, x: x / (own.a.square() + 1), (WIDTH,), None),
    "in place": (scaled_in_place, (WIDTH,), (LENGTH, WIDTH)),
    "viewed": (lambda own, x: x.transpose(1, 2) * own.a.view(1, -1, 1), (WIDTH,), None),
    "two in one": (lambda own, x: x * (own.a * own.b.sigmoid()), (WIDTH,), (LENGTH, 1)),
    "used twice": (lambda own, x: (x * own.a).tanh() * own.a + own.a.mean(), (WIDTH,), None),
    "class token and positions": (with_token, (1, 1, WIDTH), (1, LENGTH + 3, WIDTH)),
    "repeated": (lambda own, x: x + own.a.repeat(x.shape[0], LENGTH, 1), (1, 1, WIDTH), None),
    "RMSNorm": (root_mean_square, (WIDTH,), None),
    "LayerNorm": (lambda own, x: F.layer_norm(x, (WIDTH,), own.a, own.b.double(), 0.1), (WIDTH,), (WIDTH,)),
    "LayerNorm, by name": (lambda own, x: F.layer_norm(x, (WIDTH,), weight=own.a), (WIDTH,), None),
    "RMSNorm of torch": (lambda own, x: F.rms_norm(x, (WIDTH,), own.a + 1), (WIDTH,), None),
    "Linear": (lambda own, x: F.linear(x, own.a, own.b), (5, WIDTH), (5,)),
    "Linear, masked": (lambda own, x: F.linear(x, own.a * torch.eye(WIDTH), own.b), (WIDTH, WIDTH), (WIDTH,)),
    "matrix": (lambda own, x: x @ own.a + own.b, (WIDTH, 5), (5,)),
    "low rank": (lambda own, x: x + torch.matmul(x @ own.a.T, own.b), (2, WIDTH), (2, WIDTH)),
    "time first": (by_time, (WIDTH,), (LENGTH, WIDTH)),
    "folded": (folded, (WIDTH,), (WIDTH,)),
    "relative positions": (relative, (2 * LENGTH - 1, 2), None),
}


def net_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    does, a, b = CASES[name]
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Own(does, parameter(*a), None if b is None else parameter(*b))
    ).double()


def total(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).pow(3).sum() / 7


def check(net: nn.Module, x: Tensor, **options: Any) -> None:
    wanted = by_sample(net, lambda: [total(net, x[b : b + 1]) for b in range(len(x))])
    assert_equal(recorded(net, lambda: total(net, x), **options), wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, BATCH, LENGTH])
def test_moments_are_exact(name: str, batch: int) -> None:
    """LENGTH samples: as many as there are positions."""
    check(net_of(name), torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_models_own_and_gradients_to_rounding(name: str) -> None:
    net, x = net_of(name), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    total(net, x).backward()
    alone = {name: param.grad for name, param in net.named_parameters()}
    output = net(x)
    net.zero_grad()
    recorder = Recorder(net, trainable(net))
    assert type(net(x)) is Tensor
    assert torch.equal(net(x), output)
    total(net, x).backward()
    for name, param in net.named_parameters():
        torch.testing.assert_close(param.grad, alone[name], rtol=1e-12, atol=1e-12)
    assert not any(isinstance(held, Tensor) for module in net.modules() for held in vars(module).values())
    recorder.remove()


def test_weight_norm_is_exact_through_the_chain() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(WIDTH, 5, 3, padding=1)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(LENGTH, 3)),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(15, 2, bias=False), dim=1),
    ).double()
    x = torch.randn(BATCH, WIDTH, LENGTH, dtype=torch.float64)
    check(net, x)


def test_spectral_norm_is_exact_given_its_vectors() -> None:
    """Its power iteration moves on at every training forward, and what a gradient goes through are the vectors then."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 5), parametrizations.spectral_norm(nn.Linear(5, 4))).double().eval()
    check(net, torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))


def test_a_parametrization_of_ones_own() -> None:
    class Skew(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu(1) - weight.triu(1).T

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).double()
    parametrize.register_parametrization(net[0], "weight", Skew())
    check(net, torch.randn(BATCH, WIDTH, dtype=torch.float64))


def estimated(net: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """{parameter: why}, after one backward."""
    recorder = Recorder(net, trainable(net), **options)
    try:
        total(net, x).backward()
        return {row.name: row.why for row in recorder.coverage() if row.kind != "exact"}
    finally:
        recorder.remove()


def test_what_is_drawn_at_random_is_not_drawn_twice() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Own(lambda own, x: x + F.dropout(own.a, 0.5), parameter(LENGTH, WIDTH))).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    torch.manual_seed(1)
    alone = net(x)
    recorder = Recorder(net, trainable(net))
    torch.manual_seed(1)
    assert torch.equal(net(x), alone)
    recorder.remove()
    assert "dropout" in estimated(net, x)["0.a"]


def test_what_cannot_be_followed_is_estimated_and_says_by_which_function() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Own(lambda own, x: torch.einsum("btw,wo->bto", x, own.a), parameter(WIDTH, 2))).double()
    (why,) = estimated(net, torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)).values()
    assert "einsum" in why
    turned = nn.Sequential(Own(lambda own, x: own.a @ x, parameter(LENGTH, LENGTH))).double()
    (why,) = estimated(turned, torch.randn(BATCH, LENGTH, LENGTH, dtype=torch.float64)).values()
    assert "matmul" in why


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_the_forward_runs_as_ever(reentrant: bool) -> None:
    """It runs once more in backward, where nothing stands in a parameter's place."""
    torch.manual_seed(0)

    def scale(own: Own, x: Tensor) -> Tensor:
        return checkpoint(lambda x: (x * own.a).tanh(), x, use_reentrant=reentrant) + own.b

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(scale, parameter(WIDTH), parameter(WIDTH))).double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    assert estimated(net, x).keys() >= {"1.a"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_module(reentrant: bool) -> None:
    torch.manual_seed(0)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own = nn.Linear(WIDTH, WIDTH), Own(scaled_in_place, parameter(WIDTH), parameter(WIDTH))
            self.saves = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.own, x, use_reentrant=reentrant) if self.saves else self.own(x)

    net, x = Around().double(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    found = recorded(net, lambda: total(net, x))
    net.saves = False
    assert_equal(found, by_sample(net, lambda: [total(net, x[b : b + 1]) for b in range(BATCH)]))


def test_a_copy_of_the_model_records_nothing() -> None:
    net, x = net_of("scale"), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    recorder = Recorder(net, trainable(net), strict=True)
    total(net, x).backward()
    before = recorder.moment("1.a").clone()
    twin = copy.deepcopy(net)
    total(twin, 2 * x).backward()
    assert torch.equal(recorder.moment("1.a"), before)
    recorder.remove()


def test_frozen_and_thawed() -> None:
    net, x = net_of("in place"), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    recorder = Recorder(net, trainable(net), strict=True)
    net[1].a.requires_grad_(False)
    total(net, x).backward()
    net[1].a.requires_grad_(True)
    net.zero_grad()
    total(net, x).backward()
    found = {name: recorder.moment(name).clone() for name in recorder.accounts}
    recorder.remove()
    assert_equal(found, by_sample(net, lambda: [total(net, x[b : b + 1]) for b in range(BATCH)]))

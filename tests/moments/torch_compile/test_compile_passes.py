"""Passes, validations and recorders that come and go around compiled graphs: each use belongs to its own pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from gradwire.moments import Recorder

from ..oracle import assert_equal, consume_all, trainable


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3, stride=2, groups=2, bias=False))


def passes(net: nn.Module, model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Several passes of other samples, and one backward through all of them."""
    recorder = Recorder(net, trainable(net), strict=True)
    for _ in range(2):
        net.zero_grad()
        torch.stack([model(x).square().mean() for x in inputs]).sum().backward()
        moments = {name: recorder.moment(name).clone() for name in recorder.accounts}
        consume_all(recorder)
    recorder.remove()
    return moments


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: F.gelu(self.first(y)), x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        return self.last(hidden)


@pytest.mark.parametrize("make", [perceptron, Recomputed])
def test_several_passes_before_one_backward(make: Callable[[], nn.Module]) -> None:
    """Each has its own clock, which a checkpoint must not read again when it recomputes."""
    net, inputs = make(), [torch.randn(5, 3, 6) for _ in range(3)]
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert_equal(passes(net, compiled, inputs), passes(net, net, inputs), rtol=1e-5)


def test_two_passes_in_one_graph() -> None:
    net, x = perceptron(), torch.randn(5, 3, 6)

    def both(x: Tensor) -> Tensor:
        return net(x).square().mean() + net(x + 1).square().mean()

    found = []
    for loss in (both, torch.compile(both, backend="aot_eager")):
        recorder = Recorder(net, trainable(net), strict=True)
        for _ in range(2):
            net.zero_grad()
            loss(x).backward()
            moments = {name: recorder.moment(name).clone() for name in recorder.accounts}
            consume_all(recorder)
        assert recorder.passes.current.number == 4
        recorder.remove()
        found.append(moments)
    assert_equal(found[1], found[0], rtol=1e-5)


def test_a_validation_does_not_compile_the_training_again() -> None:
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    net, x = perceptron(), torch.randn(5, 3, 6)
    recorder = Recorder(net, trainable(net), strict=True)
    model = torch.compile(net, backend=backend)
    model(x).sum().backward()
    with torch.inference_mode():
        model(x)
    before = len(graphs)
    for _ in range(2):
        model(x).sum().backward()
    assert len(graphs) == before
    recorder.remove()


@pytest.mark.parametrize(("make", "shape"), [(perceptron, (5, 3, 6)), (convolutions, (5, 3, 8, 8))])
def test_a_recorder_gone_before_backward_leaves_the_gradient(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    net, x = make(), torch.randn(shape)
    net(x).square().sum().backward()
    wanted = {name: param.grad for name, param in net.named_parameters()}
    net.zero_grad()
    recorder = Recorder(net, trainable(net))
    loss = torch.compile(net, backend="aot_eager")(x).square().sum()
    recorder.remove()
    loss.backward()
    assert_equal({name: param.grad for name, param in net.named_parameters()}, wanted, rtol=1e-5)

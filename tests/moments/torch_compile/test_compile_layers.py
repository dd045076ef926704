"""Linear and convolutions under torch.compile: weight gradient and moment once and together, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from gradwire.moments import Recorder
from gradwire.moments.cpu import grad_and_moment

from ..oracle import assert_equal, consume_all, trainable

Found = tuple[dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Along(nn.Module):
    """[B, C, *] -> [B, positions, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Twice(nn.Module):
    """One layer twice in a pass: its uses are merged, so what they are made of must outlive the graph's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class SamplesSecond(nn.Module):
    """[B, T, E] -> [T, B, E] for a Linear, as inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def frozen(name: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 4))
    net.get_parameter(name).requires_grad_(False)
    return net


def images(last: nn.Module, channels_last: bool = False) -> nn.Module:
    ends = Along(), nn.LayerNorm(4), nn.Linear(4, 2)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), last, *ends)
    return net.to(memory_format=torch.channels_last) if channels_last else net


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "one position": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4, bias=False)), (5, 6), {}),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 4)), (5, 3, 6), {}),
    "more axes": (lambda: nn.Linear(6, 4, bias=False), (5, 2, 3, 6), {}),
    "samples second": (SamplesSecond, (5, 3, 6), {"batch_dim": {"layer": 1}}),
    "frozen weight": (lambda: frozen("2.weight"), (5, 3, 6), {}),
    "frozen bias": (lambda: frozen("0.bias"), (5, 3, 6), {}),
    "used twice": (Twice, (5, 3, 6), {}),
    "attention": (Attention, (5, 3, 6), {}),
    "convolution": (lambda: images(nn.Conv2d(8, 4, 3, stride=2, groups=2, bias=False)), (5, 3, 8, 8), {}),
    "channels last": (lambda: images(nn.Conv2d(8, 4, 1), channels_last=True), (5, 3, 8, 8), {}),
    "transposed": (lambda: images(nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)), (5, 3, 5, 5), {}),
    "padded by value": (lambda: images(nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular")), (5, 3, 8, 8), {}),
}


def run(net: nn.Module, model: nn.Module, inputs: list[Tensor], **options: Any) -> Found:
    """(moments, gradients) of the last of several steps: the first, which is checked, keeps all operands."""
    recorder = Recorder(net, trainable(net), strict=True, **options)
    for x in inputs:
        net.zero_grad()
        model(x).square().mean().backward()
        moments = {name: recorder.moment(name).clone() for name in recorder.accounts}
        consume_all(recorder)
    recorder.remove()
    return moments, {name: param.grad for name, param in trainable(net).items() if param.grad is not None}


def compare(case: str, **compiling: Any) -> None:
    make, shape, options = CASES[case]
    net, inputs = make(), [torch.randn(shape) for _ in range(3)]
    eager = run(net, net, inputs, **options)
    for ours, wanted in zip(run(net, torch.compile(net, **compiling), inputs, **options), eager, strict=True):
        assert_equal(ours, wanted, rtol=1e-5)
        assert all(ours[name].stride() == param.stride() for name, param in trainable(net).items())


@pytest.mark.parametrize("case", CASES)
def test_moments_and_gradients_are_those_of_eager_mode(case: str) -> None:
    compare(case, backend="aot_eager", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["positions", "used twice", "channels last"])
def test_with_inductor(case: str) -> None:
    """Which uses buffers again, and may lay out what comes between two operators as it likes."""
    compare(case, fullgraph=True)


@pytest.mark.parametrize("case", ["positions", "convolution"])
def test_with_sizes_that_change(case: str) -> None:
    make, (_, *shape), options = CASES[case]
    net, inputs = make(), [torch.randn(size, *shape) for size in (5, 2, 11)]
    found = run(net, torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True), inputs, **options)
    for ours, wanted in zip(found, run(net, net, inputs, **options), strict=True):
        assert_equal(ours, wanted, rtol=1e-5)


def graphs_of(net: nn.Module, x: Tensor) -> tuple[set[Any], list[Any]]:
    """What the compiler is given, without copies: our operators in the forward, and all calls in the backward."""
    seen: list[GraphModule] = []

    def keep(graph: GraphModule, _: object) -> Any:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    run(net, torch.compile(net, backend=backend, fullgraph=True), [x])
    forward, backward = ([node for node in graph.graph.nodes if node.op == "call_function"] for graph in seen[-2:])
    assert not any("clone" in str(node.target) for node in forward + backward)
    return {node.target for node in forward if "gradwire" in str(node.target)}, backward


def test_no_product_is_made_twice() -> None:
    """Two mm are left for the three Linears, the input gradients of the last two, and no operation of a weight's."""
    net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4))
    forward, backward = graphs_of(net, torch.randn(5, 3, 6))
    assert forward == {torch.ops.gradwire.begin.default}
    called = [node.target for node in backward]
    assert called.count(torch.ops.gradwire.layer_backward.default) == 3
    assert called.count(torch.ops.aten.mm.default) == 2
    assert not any(word in str(target) for target in called for word in ("sum", "gradwire.stage"))


def test_no_convolution_is_made_twice() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    forward, backward = graphs_of(net, torch.randn(5, 3, 8, 8))
    assert forward == {torch.ops.gradwire.begin.default}
    called = [node.target for node in backward]
    assert called.count(torch.ops.gradwire.layer_backward.default) == 2
    masks = [node.args[-1] for node in backward if node.target is torch.ops.aten.convolution_backward.default]
    assert masks == [[True, False, False]]


def test_each_layer_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    linear = grad_and_moment.linear

    def counted(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> grad_and_moment.Pair:
        calls.append((gradient.shape[2], x.shape[2]))
        return linear(gradient, x, dtype, place)

    monkeypatch.setattr(grad_and_moment, "linear", counted)
    make, shape, _ = CASES["positions"]
    net = make()
    run(net, torch.compile(net, backend="aot_eager", fullgraph=True), [torch.randn(shape) for _ in range(3)])
    assert calls == [(4, 7), (7, 6)] * 3


def test_a_layer_without_samples_has_torchs_gradient() -> None:
    """[B*T, D] has no axis of B: a doubt in every backward, and the operator makes the gradient as torch does."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(6, 4), nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x.flatten(0, 1)).tanh()[:, :, None])

    net, x = Flat(), torch.randn(5, 3, 6)
    net(x).square().sum().backward()
    wanted = {name: param.grad for name, param in net.named_parameters()}
    net.zero_grad()
    recorder = Recorder(net, trainable(net))
    torch.compile(net, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    assert_equal({name: param.grad for name, param in net.named_parameters()}, wanted, rtol=1e-6)
    assert {row.kind for row in recorder.coverage()} == {"step"}


def test_gradients_have_the_parameters_dtype_under_autocast() -> None:
    make, shape, _ = CASES["positions"]
    net, x = make(), torch.randn(shape)
    recorder = Recorder(net, trainable(net), strict=True)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(x).square().mean()
    loss.backward()
    for name, param in net.named_parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.dtype
        assert not torch.equal(param.grad, param.grad.bfloat16().float()), name  # never rounded on the way
    recorder.remove()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_operator_keeps_its_word(order: torch.memory_format) -> None:
    """Shapes, dtypes and strides are those that the compiler was told, without a recorder too."""
    weight = torch.empty(4, 3, 2, 2).to(memory_format=order)
    convolution = (*[1, 1], *[0, 0], *[1, 1], *[0, 0], 0, 1)
    clock, about = torch.tensor([1, 5]), (weight.shape, weight.stride(), torch.float64)
    given = (torch.randn(5, 4, 5, 5), torch.randn(5, 3, 6, 6), clock, 0, "", True, "weight bias", convolution, *about)
    torch.library.opcheck(torch.ops.gradwire.layer_backward.default, given)
    plain = ((6, 4), (4, 1), torch.float32)
    given = (torch.randn(5, 2, 6), torch.randn(5, 2, 4), clock, 0, "", True, "weight", [0], *plain)
    torch.library.opcheck(torch.ops.gradwire.layer_backward.default, given)


def test_a_second_derivative_is_refused() -> None:
    net, x = nn.Linear(6, 4), torch.randn(5, 3, 6, requires_grad=True)
    recorder = Recorder(net, trainable(net))
    loss = torch.compile(net, backend="eager")(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()
    recorder.remove()

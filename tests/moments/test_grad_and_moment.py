"""Weight gradient and moment from one pass: both right, the same bits at any time, and everything else as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.moments import Recorder
from gradwire.moments.cpu import fold as folding
from gradwire.moments.cpu import grad_and_moment

from .oracle import assert_equal, by_sample, recorded, trainable

ROUNDING = 2e-6  # float32 sums of at most 64 x 64 terms, relative to the largest element


def near(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert wanted.numel() == 0 or (found - wanted).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.mark.parametrize("samples", [0, 1, 2, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (31, 129), (300, 500)])
def test_linear(samples: int, outputs: int, inputs: int) -> None:
    """Of chunks and one by one; 300 x 500 fits into no chunk of eight."""
    torch.manual_seed(0)
    gradient, x = torch.randn(samples, 6, outputs), torch.randn(samples, 6, inputs)
    total, moment = grad_and_moment.linear(gradient, x, torch.float32)
    each = torch.einsum("bto,bti->boi", gradient.double(), x.double())
    near(total, each.sum(0).float())
    near(moment, each.square().sum(0).float())


@pytest.mark.parametrize("samples", [1, 3, 4, 9])
@pytest.mark.parametrize("size", [1, 31, 2048, 5000])
def test_folding_by_machine_code_and_by_torch(samples: int, size: int) -> None:
    """Onto what was there, and over it."""
    torch.manual_seed(0)
    each, begun = torch.randn(samples, size), torch.randn(2, size)
    for first in (True, False):
        wanted = torch.stack([each.double().sum(0), each.double().square().sum(0)]) + begun.double() * (not first)
        for fold in (folding.fold, folding.by_torch):
            found = begun.clone()
            fold(each.clone(), found[0], found[1], first)
            near(found, wanted.float())


def test_linear_of_halves_is_summed_in_float32() -> None:
    gradient, x = (torch.full((16, 4, 3), 1e-4, dtype=torch.float16) for _ in range(2))
    total, moment = grad_and_moment.linear(gradient, x, torch.float16)
    assert (total.dtype, moment.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(moment, torch.full((3, 3), 16 * 16e-16), rtol=0.02, atol=0)


CONVOLUTIONS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (33, 4, 11)),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), (5, 4, 9, 8)),
    "2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (6, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1), (7, 6, 5, 5)),
    "no sample": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 5, 5)),
    "one sample": (lambda: nn.Conv2d(4, 6, 3), (1, 4, 5, 5)),
    "wide": (lambda: nn.Conv2d(96, 96, 8, padding=4), (3, 96, 4, 4)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (4, 2, 3, 4, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (5, 4, 4, 4)),
    "transposed groups": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (5, 4, 6)),
    "channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (5, 4, 6, 6)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    net, x = make(), torch.randn(shape)
    if name == "channels last":
        x = x.to(memory_format=torch.channels_last)
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(len(x))])
    net(x).square().sum().backward()
    plain = {key: param.grad.clone() for key, param in trainable(net).items()}
    recorder = Recorder(net, trainable(net), strict=True)
    for _ in range(2):
        net.zero_grad()
        output = net(x)
        assert type(output.grad_fn).__name__ == "LayerFunctionBackward"
        output.square().sum().backward()
        for key, param in trainable(net).items():
            near(param.grad, plain[key])
            assert param.grad.stride() == plain[key].stride()
        assert_equal({key: recorder.moment(key) for key in wanted}, wanted, 5e-6)
    recorder.remove()


class Twice(nn.Module):
    """Calls its layers a second time when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.on = nn.Linear(6, 6), nn.Conv1d(3, 3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(self.body(x).tanh())
        return self.head(self.body(output)) if self.on else output


def test_a_layer_used_twice_in_one_pass_is_exact_at_once_and_later() -> None:
    torch.manual_seed(0)
    net, twin, x = Twice(), Twice(), torch.randn(20, 3, 6)
    twin.load_state_dict(net.state_dict())
    recorder = Recorder(net, trainable(net), strict=True)
    for on in (False, True, False, True):
        net.on = on
        net.zero_grad()
        net(x).square().sum().backward()
        found = {name: recorder.moment(name).clone() for name in recorder.accounts}
        twin.on = on
        wanted = by_sample(twin, lambda: [twin(x[b : b + 1]).square().sum() for b in range(20)])
        assert_equal(found, wanted, 1e-5)
    recorder.remove()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(2),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Flatten(1),
    ).append(nn.Linear(64, 5))


def test_a_resumed_run_has_the_same_bits() -> None:
    """What a recorder has seen so far changes neither a gradient nor a moment."""
    net, x = model(), torch.randn(12, 2, 6, 6)

    def step(recorder: Recorder) -> list[Tensor]:
        net.zero_grad()
        net(x).square().sum().backward()
        moments = [recorder.moment(name).clone() for name in recorder.accounts]
        return moments + [param.grad.clone() for param in net.parameters()]

    old = Recorder(net, trainable(net), strict=True)
    for _ in range(70):  # past the commit at which everything is compared again
        later = step(old)
    old.remove()
    new = Recorder(net, trainable(net), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(step(new), later, strict=True))
    new.remove()


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_gradient_of_the_input_alone_makes_no_weight_gradient() -> None:
    net, x = nn.Linear(5, 7), torch.randn(20, 3, 5, requires_grad=True)
    recorder = Recorder(net, trainable(net), strict=True)
    loss = net(x).square().sum()
    with Counted() as counted:
        torch.autograd.grad(loss, x, retain_graph=True)
    assert counted.names.count("mm") == 1
    assert "bmm" not in counted.names
    (slope,) = torch.autograd.grad(loss, net.weight)
    near(slope, torch.einsum("bto,bti->oi", 2 * net(x).detach(), x.detach()))
    assert not recorder.accounts["weight"].seen()
    recorder.remove()


def test_a_double_backward_is_torchs() -> None:
    """A gradient penalty: the Function's own gradients are differentiated."""
    net, x = model().double(), torch.randn(4, 2, 6, 6, dtype=torch.float64, requires_grad=True)

    def penalty() -> list[Tensor]:
        net.zero_grad()
        output = net(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (output.sum() + slope.square().sum()).backward()
        return [param.grad.clone() for param in net.parameters()]

    plain = penalty()
    recorder = Recorder(net, trainable(net))
    for a, b in zip(penalty(), plain, strict=True):
        torch.testing.assert_close(a, b)
    recorder.remove()


def test_a_weight_used_outside_under_autocast_keeps_its_gradient() -> None:
    """Autocast's cache must not be left a copy of the weight that has no history."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8), torch.randn(20, 3, 8)

    def gradient() -> Tensor:
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            inside = net(x)
            outside = F.linear(x, net.weight)
        (inside.float().sum() + 5 * outside.float().sum()).backward()
        assert net.weight.grad is not None
        return net.weight.grad.clone()

    plain = gradient()
    recorder = Recorder(net, trainable(net))
    assert (gradient() - plain).norm() < 0.02 * plain.norm()
    assert {row.name: row.kind for row in recorder.coverage()}["weight"] == "step"
    recorder.remove()


def test_a_first_layers_weight_may_be_written_to_before_backward() -> None:
    """As in torch, which keeps no weight where the input wants no gradient."""
    net, x = nn.Linear(5, 7), torch.randn(20, 3, 5)
    recorder = Recorder(net, trainable(net), strict=True)
    loss = net(x).sum()
    with torch.no_grad():
        net.weight.mul_(2)
        net.bias.mul_(2)
    loss.backward()
    near(net.weight.grad, x.sum((0, 1)).expand(7, 5))
    recorder.remove()


def test_a_hook_that_writes_into_the_gradient_is_noticed() -> None:
    net, x = nn.Linear(6, 7), torch.randn(20, 3, 6)
    recorder = Recorder(net, trainable(net))
    for write in (False, True):
        if write:
            net.weight.register_hook(lambda gradient: gradient.mul_(0.1))
        net.zero_grad()
        net(x).sum().backward()
        kinds = {row.name: row.kind for row in recorder.coverage()}
        assert kinds == {"weight": "step" if write else "exact", "bias": "exact"}
    recorder.remove()


def test_the_gradient_that_was_returned_is_not_multiplied_again_to_be_checked() -> None:
    net, x = nn.Linear(300, 300), torch.randn(4, 3, 300)
    recorder = Recorder(net, trainable(net), strict=True)
    with Counted() as counted:
        net(x).sum().backward()
    assert "mv" not in counted.names
    recorder.remove()


def test_tied_weights_have_their_cross_terms() -> None:
    net, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), torch.randn(20, 3, 6, dtype=torch.float64)
    net[1].weight = net[0].weight
    assert_equal(recorded(net, lambda: net(x).sum()), by_sample(net, lambda: [net(one[None]).sum() for one in x]))
    recorder = Recorder(net, trainable(net), strict=True)
    assert type(net(x).grad_fn).__name__ == "LayerFunctionBackward"
    recorder.remove()


def test_a_moment_is_made_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy of the weight's size; and two passes in one backward, or a nested one, do not share the place."""
    net, x = nn.Linear(6, 8), torch.randn(20, 3, 6)
    recorder = Recorder(net, trainable(net), strict=True, same_samples=False)
    account, places = recorder.accounts["weight"], []

    linear = grad_and_moment.linear

    def watched(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> grad_and_moment.Pair:
        places.append(place)
        return linear(gradient, x, dtype, place)

    monkeypatch.setattr(grad_and_moment, "linear", watched)
    net(x).square().sum().backward()
    assert places[0] is not None
    assert places[0].data_ptr() == account.moment.data_ptr()
    one = recorder.moment("weight").clone()
    net.zero_grad()
    recorder.consume("weight", account.moment)
    (net(x).square().sum() + net(x).square().sum()).backward()  # two passes: other samples
    assert [place is None for place in places[1:]] == [False, True]
    torch.testing.assert_close(recorder.moment("weight"), 2 * one)
    net(x).square().sum().backward()  # accumulates
    assert places[3] is None
    torch.testing.assert_close(recorder.moment("weight"), 3 * one)
    recorder.remove()

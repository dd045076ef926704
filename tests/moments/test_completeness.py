"""The check that a parameter's uses add up to its gradient: at every backward, and without false alarms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments import Recorder

from .oracle import trainable

OUTSIDE = "it is also used outside its module"


def why(recorder: Recorder) -> dict[str, str]:
    return {row.name: row.why for row in recorder.coverage() if row.kind != "exact"}


class Late(nn.Module):
    """Uses its layer's weight a second time, outside, when it is told to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.on = layer, False

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).tanh()
        return output + self.layer.weight.square().sum() if self.on else output


@pytest.mark.parametrize("layer", ["Linear", "Conv1d", "LayerNorm", "Embedding"])
def test_a_use_outside_that_begins_later_is_noticed(layer: str) -> None:
    torch.manual_seed(0)
    net = Late(
        {"Linear": nn.Linear(6, 6), "Conv1d": nn.Conv1d(3, 6, 2), "LayerNorm": nn.LayerNorm(6)}.get(
            layer, nn.Embedding(9, 6)
        )
    )
    x = torch.randint(0, 9, (4, 3)) if layer == "Embedding" else torch.randn(4, 3, 6)
    recorder = Recorder(net, trainable(net))
    kinds = []
    for on in (False, True, False, True, True, False):
        net.on = on
        net.zero_grad()
        net(x).square().sum().backward()
        kinds.append("layer.weight" in why(recorder))
    assert kinds == [False, True, False, True, True, True]  # thrice, and it is believed no more
    assert OUTSIDE in why(recorder)["layer.weight"]
    recorder.remove()


def test_a_double_backward_that_begins_later_is_noticed() -> None:
    """A gradient penalty every other step."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)), torch.randn(4, 6, requires_grad=True)
    recorder = Recorder(net, trainable(net))
    net(x).sum().backward()
    assert not why(recorder)
    net.zero_grad()
    output = net(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.sum() + 10 * (slope.norm(dim=1) - 1).square().sum()).backward()
    assert {"0.weight", "2.weight"} <= why(recorder).keys()
    recorder.remove()


def test_a_hook_that_changes_the_gradient_later_is_noticed() -> None:
    net, x = nn.Linear(6, 7), torch.randn(4, 6)
    recorder = Recorder(net, trainable(net))
    net(x).sum().backward()
    net.weight.register_hook(lambda gradient: gradient * 0.1)
    net(x).sum().backward()  # accumulated onto the first
    assert list(why(recorder)) == ["weight"]
    recorder.remove()


@pytest.mark.parametrize("autocast", [True, False])
def test_no_false_alarm_in_bfloat16(autocast: bool) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 8))
        x = torch.randn(8, 64, 64)
        if not autocast:
            net, x = net.bfloat16(), x.bfloat16()
        recorder = Recorder(net, trainable(net), strict=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().square().mean()
        loss.backward()
        assert not why(recorder)
        recorder.remove()


def test_a_gradient_of_rounding_is_no_alarm_though_it_comes_first() -> None:
    """A key's bias under softmax, in a model that has nothing else."""
    for seed in range(5):
        torch.manual_seed(seed)
        net = nn.Linear(8, 8)
        x = torch.randn(6, 9, 8)
        recorder = Recorder(net, {"bias": net.bias}, strict=True)
        F.scaled_dot_product_attention(x, net(x), x).square().mean().backward()
        assert not why(recorder)
        recorder.remove()


def test_no_reference_makes_accumulate_copy() -> None:
    """The gradient that arrives becomes .grad itself."""
    net, x = nn.Linear(300, 300), torch.randn(4, 300)
    recorder = Recorder(net, trainable(net))
    came: list[int] = []
    net.weight.register_hook(lambda gradient: came.append(gradient.data_ptr()))
    net(x).sum().backward()
    assert net.weight.grad.data_ptr() == came[0]
    recorder.remove()

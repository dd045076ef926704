"""Which passes and steps count: checkpoints, passes never differentiated, resumed steps, refused recorders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import AttachError, MomentError
from gradwire.moments import Recorder
from gradwire.moments.recorder import RECORDERS

from .oracle import assert_equal, by_sample, consume_all, recorded, trainable


class Reused(nn.Module):
    """One block three times, under checkpoints or not."""

    def __init__(self, inside: bool | None) -> None:
        super().__init__()
        self.first, self.block, self.inside = nn.Linear(6, 6), nn.Linear(6, 6), inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x)).tanh()
        for _ in range(2):
            x = self.block(x) if self.inside is None else checkpoint(self.block, x, use_reentrant=self.inside)
            x = x.tanh()
        return x


def test_a_reused_parameter_under_a_reentrant_checkpoint_is_estimated() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(4, 6), Reused(True)
    recorder = Recorder(net, trainable(net))
    for _ in range(2):  # the second time its micro-batches are being counted, and regions are none
        net.zero_grad()
        net(x).square().sum().backward()
        consume_all(recorder)
    rows = {row.name: row for row in recorder.coverage()}
    assert rows["block.weight"].kind == rows["block.bias"].kind == "step"
    assert "use_reentrant=False" in rows["block.weight"].why
    assert rows["first.weight"].kind == "exact"
    assert torch.equal(recorder.moment("block.weight"), net.block.weight.grad.square())
    recorder.remove()
    with pytest.raises(MomentError, match="use_reentrant=False"):
        recorded(net, lambda: net(x).square().sum())


def test_a_reused_parameter_under_the_other_checkpoint_is_exact() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(4, 6).double(), Reused(False).double()
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(4)])
    assert_equal(recorded(net, lambda: net(x).square().sum()), wanted)


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,i->bi", self.layer(x), self.scale)  # a product would be exact


def grouped(idle: int) -> tuple[Tensor, Recorder]:
    torch.manual_seed(0)
    net = Raw()
    parts = torch.randn(3, 4, 6)
    recorder = Recorder(net, trainable(net), estimator="groups")
    for _ in range(2):
        net.zero_grad()
        for x in parts:
            for _ in range(idle):
                net(torch.randn(9, 6))  # validation without no_grad
            net(x).square().sum().backward()
        consume_all(recorder)
    assert {row.kind for row in recorder.coverage()} == {"exact", "groups"}
    recorder.remove()
    return recorder.moment("scale"), recorder


def test_groups_count_only_passes_that_are_differentiated() -> None:
    plain, _ = grouped(0)
    idle, recorder = grouped(100)
    torch.testing.assert_close(idle, plain)
    assert len(recorder.passes._open) <= 64


def test_two_passes_in_flight_are_told_apart() -> None:
    """Both forwards, then both backwards: each micro-batch has its own samples."""
    torch.manual_seed(0)
    net, xs = Raw(), (torch.randn(2, 6), torch.randn(5, 6))
    moments = []
    for together in (False, True):
        recorder = Recorder(net, trainable(net), estimator="groups")
        for _ in range(2):
            net.zero_grad()
            losses = [net(x).square().sum() for x in xs] if together else []
            for place, x in enumerate(xs):
                (losses[place] if together else net(x).square().sum()).backward()
            consume_all(recorder)
        moments.append(recorder.moment("scale").clone())
        recorder.remove()
    torch.testing.assert_close(*moments)


def test_a_micro_batch_that_was_zeroed_is_not_seen() -> None:
    for to_none in (False, True):
        net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        net.forward = lambda x, both, net=net: net[0](x) + (net[1](x) if both else 0)
        recorder = Recorder(net, trainable(net))
        net(torch.randn(4, 6), True).sum().backward()
        assert recorder.accounts["1.weight"].seen()
        net.zero_grad(set_to_none=to_none)
        net(torch.randn(4, 6), False).sum().backward()
        assert recorder.accounts["0.weight"].seen()
        assert not recorder.accounts["1.weight"].seen()
        assert not recorder.moment("1.weight").any()
        recorder.remove()


def signed(net: nn.Module, steps: range, x: Tensor) -> Tensor:
    recorder = Recorder(net, trainable(net), estimator="signs")
    for step in steps:
        recorder.passes.begin_step(step)
        net.zero_grad()
        for _ in range(2):
            net(x).square().sum().backward()
        consume_all(recorder)
    recorder.remove()
    return recorder.moment("weight_hh_l0").clone()


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def test_signs_resume_bit_for_bit() -> None:
    torch.manual_seed(0)
    net, x = Recurrent(4, 4, batch_first=True), torch.randn(6, 3, 4)
    assert torch.equal(signed(net, range(5), x), signed(net, range(4, 5), x))
    assert not torch.equal(signed(net, range(4), x), signed(net, range(5), x))


def test_signs_let_an_in_place_operation_follow() -> None:
    """A module unknown here may have saved its output."""

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).exp()

    torch.manual_seed(0)
    net, x = nn.Sequential(Unknown()), torch.randn(4, 6)
    net(x).mul(2).sum().backward()
    truth = net[0].scale.grad.clone()
    net.zero_grad()
    recorder = Recorder(net, trainable(net), estimator="signs")
    net(x).mul_(2).sum().backward()
    assert torch.equal(net[0].scale.grad, truth)
    recorder.remove()


@pytest.mark.parametrize("first", [True, False])
def test_a_transformer_as_the_root_tells_its_own_axis(first: bool) -> None:
    torch.manual_seed(0)
    net = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=first).double()
    source, target = torch.randn(3, 5, 8).double(), torch.randn(3, 4, 8).double()

    def output(b: slice) -> Tensor:
        inputs = (source[b], target[b])
        return net(*(inputs if first else (x.transpose(0, 1) for x in inputs))).pow(3).sum()

    wanted = by_sample(net, lambda: [output(slice(b, b + 1)) for b in range(3)])
    assert_equal(recorded(net, lambda: output(slice(None))), wanted, 1e-8)


@pytest.mark.usefixtures("group")
def test_a_transformer_inside_ddp_tells_its_own_axis() -> None:
    net = nn.parallel.DistributedDataParallel(nn.TransformerEncoderLayer(8, 2, 16, 0.0))
    names = {name.removeprefix("module."): param for name, param in net.named_parameters()}
    recorder = Recorder(net, names, strict=True)
    net(torch.randn(5, 3, 8)).pow(3).sum().backward()
    assert {row.kind for row in recorder.coverage()} == {"exact"}
    assert recorder.batch == 3
    recorder.remove()


def test_torch_jit_script_is_refused_with_the_remedy() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    recorder = Recorder(net, trainable(net))
    with pytest.raises(AttachError, match=r"wire\.detach\(\) first"):
        torch.jit.script(net)
    recorder.remove()
    torch.jit.script(net)(torch.randn(2, 4))


def test_a_recorder_that_failed_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    before = len(RECORDERS)
    with pytest.raises(MomentError, match="LSTM has no exact formula"):
        Recorder(net, trainable(net), strict=True)
    names: dict[str, Any] = {**trainable(net), "no parameter": object()}
    with pytest.raises(AttributeError):
        Recorder(net, names)
    assert len(RECORDERS) == before
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    assert all("forward" not in module.__dict__ for module in net.modules())
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in net.parameters())
    recorder = Recorder(net, trainable(net))
    with pytest.raises(AttachError, match=r"wire\.detach\(\)"):
        Recorder(net, trainable(net))
    recorder.remove()

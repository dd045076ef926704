"""Estimates where no exact formula serves: their formulas, and that they are right on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.moments import Recorder
from gradwire.moments.batch_axis import SEVERAL
from gradwire.moments.micro_batches import GroupSpread

from .oracle import Root, by_sample, consume_all, trainable


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def groups_by_hand(shares: list[Tensor], sizes: list[int]) -> Tensor:
    """The formula of the documentation, for unequal micro-batches."""
    whole, samples = torch.stack(shares).sum(0), sum(sizes)
    spread = sum((h - whole * n / samples) ** 2 for h, n in zip(shares, sizes, strict=True))
    within = spread / (1 - sum(n * n for n in sizes) / samples**2)
    return (1 - 1 / samples) * within + whole**2 / samples


@pytest.mark.parametrize("sizes", [[4, 4], [4, 4, 4, 4], [3, 5, 2], [1, 7]])
def test_groups_formula(sizes: list[int]) -> None:
    torch.manual_seed(0)
    shares = [floats(3, 2) * n + 1 for n in sizes]
    groups = GroupSpread(shares[0], torch.float64)
    for share, size in zip(shares, sizes, strict=True):
        groups.add(share, size)
    found = groups.moment(torch.stack(shares).sum(0))
    torch.testing.assert_close(found, groups_by_hand(shares, sizes), rtol=1e-12, atol=0)
    if len(set(sizes)) == 1:
        count, samples, whole = len(sizes), sum(sizes), torch.stack(shares).sum(0)
        squares = torch.stack(shares).square().sum(0)
        spread = count / (count - 1) * (squares - whole**2 / count)
        torch.testing.assert_close(found, (1 - 1 / samples) * spread + whole**2 / samples, rtol=1e-12, atol=0)


def test_groups_do_not_cancel_in_float32() -> None:
    """A large mean and a small spread: sum h^2 - g^2/K would be noise, or negative."""
    shares = [torch.tensor([1000.0 + 0.001 * k]) for k in range(4)]
    groups = GroupSpread(shares[0], torch.float32)
    for share in shares:
        groups.add(share, 2)
    exact = groups_by_hand([share.double() for share in shares], [2] * 4)
    found = groups.moment(torch.stack(shares).sum(0))
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)


def test_groups_of_one_sample_each_are_exact() -> None:
    """K = B: then nothing is left to estimate."""
    shares = [floats(5) for _ in range(6)]
    groups = GroupSpread(shares[0], torch.float64)
    for share in shares:
        groups.add(share, 1)
    torch.testing.assert_close(groups.moment(torch.stack(shares).sum(0)), torch.stack(shares).square().sum(0))


def test_recorded_groups_follow_the_formula() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(3, 4, batch_first=True).double()
    recorder = Recorder(net, trainable(net))
    for sizes in ([4, 4], [2, 5, 3]):
        net.zero_grad()
        shares: dict[str, list[Tensor]] = {name: [] for name in recorder.accounts}
        for size in sizes:
            before = {name: p.grad.clone() if p.grad is not None else 0 for name, p in net.named_parameters()}
            net(floats(size, 6, 3))[0].square().sum().backward()
            for name, param in net.named_parameters():
                shares[name].append(param.grad - before[name])
        consume_all(recorder)
        for name in recorder.accounts:
            torch.testing.assert_close(recorder.moment(name), groups_by_hand(shares[name], sizes))
        assert {row.kind for row in recorder.coverage()} == {"groups"}
    recorder.remove()


WITHOUT = (
    "torch.nn.modules.rnn.{} has no exact formula; estimator='signs', or two micro-batches and more, estimate it best"
)


def test_step_is_the_square_of_the_whole_gradient() -> None:
    torch.manual_seed(0)
    net = nn.GRU(3, 4, batch_first=True).double()
    recorder = Recorder(net, trainable(net), estimator="step")
    for _ in range(2):
        net.zero_grad()
        for _ in range(3):
            net(floats(5, 6, 3))[0].square().sum().backward()
        consume_all(recorder)
        for name, param in net.named_parameters():
            assert torch.equal(recorder.moment(name), param.grad.square())
    assert {(row.kind, row.why) for row in recorder.coverage()} == {("step", WITHOUT.format("GRU"))}
    recorder.remove()


def test_one_micro_batch_falls_back_to_the_step() -> None:
    net = nn.GRU(3, 4, batch_first=True).double()
    recorder = Recorder(net, trainable(net))
    net(floats(5, 6, 3))[0].square().sum().backward()
    consume_all(recorder)
    assert torch.equal(recorder.moment("weight_hh_l0"), net.weight_hh_l0.grad.square())
    recorder.remove()


class States(nn.Module):
    """Uses both the outputs and the states of an LSTM: their sample axes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, cell) = self.lstm(x)
        return self.head(output).sum(1) + hidden[0, :, :2] * cell[0, :, 2:]


class Raw(nn.Module):
    """A raw parameter used twice beside a layer: signs must be the same for a sample in all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled = torch.einsum("bi,i->bi", x, self.scale)  # a product would be exact
        return torch.einsum("bi,i->bi", self.layer(scaled.tanh()), self.scale)


SIGNED: dict[str, Any] = {
    "LSTM": (States, ["lstm.weight_hh_l0", "lstm.bias_ih_l0"], (6, 3, 3)),
    "raw parameter": (Raw, ["scale"], (6, 3)),
    "called twice": (
        lambda: nn.Sequential(layer := Raw(), nn.Tanh(), layer),
        ["0.scale"],
        (6, 3),
    ),
}


@pytest.mark.parametrize("name", SIGNED)
def test_signs_are_right_on_average(name: str) -> None:
    """Mean of many draws within five standard errors of the truth, and the draws do differ."""
    torch.manual_seed(0)
    make, names, shape = SIGNED[name]
    net, x = make().double(), floats(*shape)
    inputs = (torch.empty(shape[0]), x) if isinstance(net, Root) else (x,)

    def losses() -> list[Tensor]:
        return list(net(*inputs).square().flatten(1).sum(1))

    truth = by_sample(net, losses)
    recorder = Recorder(net, trainable(net), estimator="signs")
    draws: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(200):
        net.zero_grad()
        net(*inputs).square().sum().backward()
        consume_all(recorder)
        for key in names:
            draws[key].append(recorder.moment(key).clone())
    rows = {row.name: row.kind for row in recorder.coverage()}
    plain = {key: dict(net.named_parameters())[key].grad.clone() for key in names}
    recorder.remove()
    net.zero_grad()
    net(*inputs).square().sum().backward()
    for key in names:
        assert rows[key] == "signs"
        found = torch.stack(draws[key])
        error = found.std(0) / found.shape[0] ** 0.5
        assert (error > 0).any()
        off = ((found.mean(0) - truth[key]).abs() / (error + 1e-12 * truth[key].max())).max()
        assert off < 5, f"{key}: {float(off):.1f} standard errors"
        assert torch.equal(plain[key], dict(net.named_parameters())[key].grad), "the gradient itself is untouched"


def test_signs_leave_exact_parameters_exact() -> None:
    net = States().double()
    recorder = Recorder(net, trainable(net), estimator="signs")
    net(floats(6, 3, 3)).square().sum().backward()
    rows = {row.name: row.kind for row in recorder.coverage()}
    assert rows["head.weight"] == "exact"
    assert rows["lstm.weight_ih_l0"] == "signs"
    recorder.remove()


def test_signs_without_exact_serve_every_layer() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = floats(6, 3)
    truth = by_sample(net, lambda: list(net(x).square().sum(1)))
    recorder = Recorder(net, trainable(net), estimator="signs", exact=False)
    total = torch.zeros_like(net[0].weight)
    for _ in range(400):
        net.zero_grad()
        net(x).square().sum().backward()
        consume_all(recorder)
        total += recorder.moment("0.weight")
    assert {row.kind for row in recorder.coverage()} == {"signs"}
    assert 0.85 < float(total.sum() / 400 / truth["0.weight"].sum()) < 1.15
    recorder.remove()


def test_signs_without_a_sample_axis_fall_back_to_the_step() -> None:
    net = nn.LSTM(3, 4).double()  # samples second, and five positions first
    root = Root(net)
    recorder = Recorder(root, trainable(root), estimator="signs")
    root(torch.empty(7), floats(5, 6, 3))[0].square().sum().backward()
    consume_all(recorder)
    row = next(row for row in recorder.coverage() if row.name == "layer.weight_hh_l0")
    assert row.kind == "step"
    assert "signs need a sample axis in the output: no axis of what it puts out is the batch's" in row.why
    assert torch.equal(recorder.moment("layer.weight_hh_l0"), net.weight_hh_l0.grad.square())
    recorder.remove()


def test_a_doubt_in_one_micro_batch_makes_the_whole_step_an_estimate() -> None:
    """An axis that fits in one micro-batch only: what was exact before is not mixed with what is not."""
    torch.manual_seed(0)
    root = Root(nn.Linear(3, 2).double())
    recorder = Recorder(root, trainable(root))
    x = floats(4, 3)
    for probe in (4, 5):
        root(torch.empty(probe), x).square().sum().backward()
    consume_all(recorder)
    weight = root.layer.weight
    assert torch.equal(recorder.moment("layer.weight"), weight.grad.square())
    root.zero_grad()
    root(torch.empty(4), x).square().sum().backward()
    consume_all(recorder)
    # and it is not believed when it fits again: that may be chance
    why = f"torch.nn.modules.linear.Linear: {SEVERAL}; one micro-batch, and groups needs two"
    assert {row.why for row in recorder.coverage()} == {why}
    recorder.remove()

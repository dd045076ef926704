"""When a moment counts: exactly when a gradient arrives in `.grad`, and never twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from gradwire.moments import Recorder

from .oracle import assert_equal, by_sample, consume_all, trainable

BATCH = 4


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


@pytest.fixture
def recorder(net: nn.Sequential) -> Iterator[Recorder]:
    recorder = Recorder(net, trainable(net), strict=True)
    yield recorder
    recorder.remove()


def truth(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """By a plain copy, which a deep copy of a watched model is."""
    return by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(len(x))])


def unwatched(net: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    """The sum of the batches' true moments, on a model of the same weights."""
    twin = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    twin.load_state_dict(net.state_dict())
    found = [truth(twin, x) for x in batches]
    return {name: sum(moments[name] for moments in found) for name in found[0]}


def moments(recorder: Recorder) -> dict[str, Tensor]:
    return {name: recorder.moment(name).clone() for name in recorder.accounts}


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()


def test_accumulation_adds_and_a_new_step_overwrites(net: nn.Sequential, recorder: Recorder) -> None:
    a, b, c = floats(BATCH, 3), floats(BATCH + 2, 3), floats(BATCH, 3)
    loss(net, a).backward()
    loss(net, b).backward()
    assert_equal(moments(recorder), unwatched(net, a, b))
    net.zero_grad()
    loss(net, c).backward()
    assert_equal(moments(recorder), unwatched(net, c))


def test_a_consumed_moment_is_overwritten_though_grad_stays(net: nn.Sequential, recorder: Recorder) -> None:
    a, b = floats(BATCH, 3), floats(BATCH, 3)
    assert not recorder.accounts["0.weight"].seen()
    loss(net, a).backward()
    assert recorder.accounts["0.weight"].seen()
    consume_all(recorder)
    assert not recorder.accounts["0.weight"].seen()
    assert_equal(moments(recorder), unwatched(net, a))
    loss(net, b).backward()
    assert recorder.accounts["0.weight"].seen()
    assert_equal(moments(recorder), unwatched(net, b))


def test_zero_grad_to_zeros_starts_anew(net: nn.Sequential, recorder: Recorder) -> None:
    a, b = floats(BATCH, 3), floats(BATCH, 3)
    loss(net, a).backward()
    net.zero_grad(set_to_none=False)
    loss(net, b).backward()
    assert_equal(moments(recorder), unwatched(net, b))


def test_clipping_between_micro_batches_does_not_start_anew(net: nn.Sequential, recorder: Recorder) -> None:
    """.grad was written to, but is not empty: the first micro-batch is still in it."""
    a, b = floats(BATCH, 3), floats(BATCH, 3)
    loss(net, a).backward()
    clip_grad_norm_(net.parameters(), 1e9)
    loss(net, b).backward()
    assert_equal(moments(recorder), unwatched(net, a, b))


def test_gradients_that_are_thrown_away_do_not_count(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3).requires_grad_()
    torch.autograd.grad(loss(net, x), x)
    assert not any(recorder.accounts[name].seen() for name in recorder.accounts)
    assert not any(account.reported for account in recorder.accounts.values()), "staged uses keep memory alive"
    loss(net, x).backward()
    assert_equal(moments(recorder), unwatched(net, x.detach()))
    torch.autograd.grad(loss(net, x), list(net.parameters()))
    assert_equal(moments(recorder), unwatched(net, x.detach()))


def in_pairs(net: nn.Module, one: Tensor, other: Tensor) -> dict[str, Tensor]:
    """The true moments where row b of both batches is one sample, on a model of the same weights."""
    twin = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    twin.load_state_dict(net.state_dict())
    return by_sample(twin, lambda: [loss(twin, one[b : b + 1]) + loss(twin, other[b : b + 1]) for b in range(len(one))])


def test_two_passes_in_one_backward_are_of_the_same_samples(net: nn.Sequential, recorder: Recorder) -> None:
    """A Siamese net's; a discriminator's real and false ones come in pairs."""
    real, fake = floats(BATCH, 3), floats(BATCH, 3)
    (loss(net, real) + loss(net, fake)).backward()
    assert_equal(moments(recorder), in_pairs(net, real, fake))
    assert {(row.kind, row.why) for row in recorder.coverage()} == {("exact", "")}


def test_two_passes_may_be_said_to_have_samples_of_their_own(net: nn.Sequential) -> None:
    recorder = Recorder(net, trainable(net), strict=True, same_samples=False)
    real, fake = floats(BATCH, 3), floats(BATCH, 3)
    (loss(net, real) + loss(net, fake)).backward()
    assert_equal(moments(recorder), unwatched(net, real, fake))
    recorder.remove()


def test_two_passes_of_unequal_size_have_samples_of_their_own(net: nn.Sequential, recorder: Recorder) -> None:
    real, fake = floats(BATCH, 3), floats(BATCH + 3, 3)
    (loss(net, real) + loss(net, fake)).backward()
    assert_equal(moments(recorder), unwatched(net, real, fake))
    said = {(row.kind, row.why) for row in recorder.coverage()}
    assert said == {("exact", "one backward through passes of 4 and of 7 samples: they count as different ones")}


def test_a_pass_that_is_never_differentiated(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3)
    net(floats(BATCH + 1, 3))
    with torch.no_grad():
        net(floats(BATCH + 5, 3))
    kept = loss(net, x)
    with torch.no_grad():
        net(floats(BATCH + 5, 3))
    kept.backward()
    assert_equal(moments(recorder), unwatched(net, x))


def test_a_second_backward_through_one_graph_accumulates(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3)
    kept = loss(net, x)
    kept.backward(retain_graph=True)
    kept.backward()
    assert_equal(moments(recorder), unwatched(net, x, x))


def test_freezing_may_come_and_go(net: nn.Sequential, recorder: Recorder) -> None:
    x, y = floats(BATCH, 3), floats(BATCH, 3)
    net[0].requires_grad_(False)
    loss(net, x).backward()
    assert not recorder.accounts["0.weight"].seen()
    assert {row.name: row.kind for row in recorder.coverage()}["0.weight"] == "frozen"
    net[0].requires_grad_(True)
    net[3].weight.requires_grad_(False)
    net.zero_grad()
    loss(net, y).backward()
    net[3].weight.requires_grad_(True)
    wanted = unwatched(net, y)
    wanted["3.weight"] = unwatched(net, x)["3.weight"]
    assert_equal(moments(recorder), wanted)


def test_a_backward_that_raises_leaves_nothing_behind(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3)

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    hook = net[2].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss(net, x).backward()
    hook.remove()
    net.zero_grad()
    loss(net, x).backward()
    assert_equal(moments(recorder), unwatched(net, x))
    assert not any(account.reported for account in recorder.accounts.values())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_changes_nothing(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3)
    loss(net, x).backward(create_graph=True)
    assert_equal(moments(recorder), unwatched(net, x))
    assert not recorder.moment("0.weight").requires_grad


def test_gradients_are_torchs_own_bit_for_bit(net: nn.Sequential, recorder: Recorder) -> None:
    x = floats(BATCH, 3)
    loss(net, x).backward()
    found = {name: param.grad.clone() for name, param in net.named_parameters()}
    recorder.remove()
    net.zero_grad()
    loss(net, x).backward()
    for name, param in net.named_parameters():
        assert torch.equal(found[name], param.grad)


def test_the_moment_moves_into_the_buffer_it_is_bound_to(net: nn.Sequential, recorder: Recorder) -> None:
    a, b = floats(BATCH, 3), floats(BATCH, 3)
    loss(net, a).backward()
    flat = torch.full((17,), 7.0)
    recorder.bind("0.weight", flat[1:16])
    torch.testing.assert_close(flat[1:16].view(5, 3), unwatched(net, a)["0.weight"].float())
    loss(net, b).backward()
    torch.testing.assert_close(flat[1:16].view(5, 3), unwatched(net, a, b)["0.weight"].float())
    assert flat[0] == flat[16] == 7.0
    with pytest.raises(ValueError, match=r"'0.weight' needs a float32 buffer of shape \(15,\)"):
        recorder.bind("0.weight", flat)


def test_a_bound_buffer_follows_the_memory_order_of_the_parameter() -> None:
    """DDP's buckets hold a channels_last weight as it lies in memory."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    recorder = Recorder(net, trainable(net))
    flat = torch.zeros(net.weight.numel())
    recorder.bind("weight", flat)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    net(x).square().sum().backward()
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(2)])["weight"]
    torch.testing.assert_close(flat, wanted.permute(0, 2, 3, 1).reshape(-1))
    recorder.remove()

"""VGC with the momentum in what it holds back: what stops, what goes on, and what cannot be asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
import scenes
from gradwire import VGC, TopK
from gradwire.codec import reference
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.vgc import VGCState

LAYOUT = Layout.of([("a", (40,)), ("b", (1,)), ("c", (300,))])
METHOD = VGC(alpha=0.5, momentum=0.5)
ALL = tuple(slot.numel for slot in LAYOUT)
MOMENT = torch.full((LAYOUT.numel,), 0.5)


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(LAYOUT.numel, generator=generator) + 0.2


def stepped(ranks: InProcess, step: int, **options: Any) -> Any:
    return ranks([gradient(step)], [MOMENT], **options)


def test_undo_gives_all_three_back() -> None:
    ranks = InProcess(METHOD, LAYOUT)
    stepped(ranks, 0)
    residual, variance, velocity = ranks.snapshot()[0]
    done = stepped(ranks, 1)
    assert 20 < (done.mean != 0).sum() < 320
    sent = done.mean != 0
    assert not ranks.states[0].velocity[sent].any()
    done.undo[0]()
    state, moved = ranks.states[0], velocity * 0.5 + gradient(1)
    assert torch.equal(state.velocity, moved)
    assert torch.equal(state.residual, residual + moved)
    assert torch.equal(state.variance[sent], (variance + MOMENT)[sent])


def test_what_finds_no_room_keeps_its_velocity() -> None:
    ranks = InProcess(METHOD, LAYOUT)
    ranks.rooms = (3, 0, 5)
    done = stepped(ranks, 0)
    sent = done.mean != 0
    assert sent.sum() == 8
    assert torch.equal(ranks.states[0].velocity, torch.where(sent, 0.0, gradient(0)))


def test_a_dense_step_sends_the_velocity_and_keeps_it() -> None:
    """A training with dense steps alone is one by momentum SGD."""
    ranks, velocity = InProcess(METHOD, LAYOUT), torch.zeros(LAYOUT.numel)
    for step in range(4):
        done = stepped(ranks, step, dense=True)
        velocity = velocity * 0.5 + gradient(step)
        assert torch.equal(done.mean, velocity)
        assert not ranks.states[0].residual.any()


def test_a_tensor_without_a_gradient_keeps_everything() -> None:
    ranks, idle = InProcess(METHOD, LAYOUT), LAYOUT.slots[2]
    stepped(ranks, 0, dense=True)  # r = 0 and u is not
    before = [idle.of(tensor).clone() for tensor in ranks.snapshot()[0]]
    assert before[2].any()
    active = torch.tensor([slot is not idle for slot in LAYOUT])
    for dense in (False, True):
        done = stepped(ranks, 1, active=active, dense=dense)
        assert not idle.of(done.mean).any()
        after = [idle.of(tensor) for tensor in ranks.snapshot()[0]]
        assert all(torch.equal(one, two) for one, two in zip(after, before, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_after_a_bad_value_its_velocity_begins_anew(bad: float) -> None:
    ranks = InProcess(METHOD, LAYOUT)
    stepped(ranks, 0)
    residual, _, velocity = ranks.snapshot()[0]
    grad = gradient(1)
    grad[7] = bad
    done = ranks([grad], [MOMENT])
    assert not done.finite
    moved = velocity * 0.5 + gradient(1)
    moved[7] = 0
    assert torch.equal(ranks.states[0].velocity, moved)
    assert torch.equal(ranks.states[0].residual, residual + moved)
    assert stepped(ranks, 2).finite


def test_places_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a chunk's own place, and which chunk it is: as where all lie in one."""
    context, states = Context(LAYOUT, 0, capacity=ALL), [METHOD.init(LAYOUT, torch.device("cpu")) for _ in range(2)]
    monkeypatch.setattr(gradwire.codec, "select", lambda device: reference)
    for step in range(3):
        for state, chunk in zip(states, (gradwire.codec.CHUNK, 64), strict=True):
            METHOD.choose(gradient(step), MOMENT, state, context, LAYOUT, ALL, chunk)
    assert torch.equal(states[0].velocity, states[1].velocity)
    assert (states[0].velocity == 0).any()


def test_without_momentum_there_is_no_velocity() -> None:
    assert type(VGC().init(LAYOUT, torch.device("cpu"))) is VGCState


def test_what_cannot_be_asked_for() -> None:
    for options in ({"momentum": 1.0}, {"momentum": -0.1}, {"momentum": torch.nan}):
        with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
            VGC(**options)
    for options in ({"feedback": True}, {"tau": 0.1}):
        with pytest.raises(ValueError, match="leave out feedback and tau"):
            VGC(momentum=0.9, **options)


def test_a_simulation_does_not_begin_with_momentum_on_the_way() -> None:
    ranks = InProcess(VGC(), LAYOUT, planned=True)
    with pytest.raises(ValueError, match="holds back something else"):
        ranks.use(VGC(momentum=0.9))
    ranks.use(VGC(alpha=2.0))


def warned(compressor: Any, momentum: float) -> list[str]:
    """What a worker is told in three steps."""
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, compressor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        list(scenes.train(model, range(3), optimizer))
    return [str(one.message) for one in seen]


def test_two_momenta_are_told_once(spawn: Any) -> None:
    assert spawn(2, warned, METHOD, 0.9) == [
        [
            "gradwire: VGC(momentum=0.5) has the momentum in what it holds back, and the optimizer has one of 0.9 too: "
            "set the optimizer's to 0"
        ],
        [],
    ]


@pytest.mark.parametrize("method", [VGC(), TopK()], ids=repr)
def test_momentum_in_the_optimizer_is_told_once(spawn: Any, method: VGC | TopK) -> None:
    ((told,),) = spawn(1, warned, method, 0.9)
    assert f"the optimizer's momentum of 0.9 delays what {type(method).__name__} holds back" in told
    assert "momentum=0 and lr / (1 - 0.9)" in told


@pytest.mark.parametrize(("method", "momentum"), [(METHOD, 0.0), (VGC(), 0.0), (gradwire.PowerSGD(), 0.9)], ids=repr)
def test_nothing_is_told_where_nothing_is_known(spawn: Any, method: Any, momentum: float) -> None:
    assert spawn(1, warned, method, momentum) == [[]]


def spoiled() -> tuple[list[bool], list[bool]]:
    """Five steps with a scaler, a bad value on rank 1 in the third: which were finite; whether all velocities are."""
    model, scaler = scenes.ddp(scenes.net()), torch.amp.GradScaler("cpu", init_scale=1.0)
    wire = gradwire.attach(model, METHOD, scaler=scaler)
    optimizer, steps, kept = torch.optim.SGD(model.parameters(), lr=0.05), [], []
    for step in range(5):
        x, y = scenes.batch(step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss * (torch.inf if step == 2 and dist.get_rank() == 1 else 1.0)).backward()
        steps.append(all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None))
        scaler.step(optimizer)
        scaler.update()
        fields = wire.state_dict()["parameters"].values()
        kept.append(all(bool(torch.isfinite(one["velocity"]).all()) for one in fields))
    return steps, kept


def test_a_step_that_a_scaler_leaves_out_leaves_no_bad_velocity(spawn: Any) -> None:
    for steps, kept in spawn(2, spoiled):
        assert steps == [True, True, False, True, True]
        assert all(kept)

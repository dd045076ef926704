"""VGC element by element against slow scalar Python, the quantizer, capacity, and wrong hyper-parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire import VGC
from gradwire.layout import Layout
from gradwire.methods import Context, from_spec
from oracle import Worker

SIZES = [33, 1, 31, 64, 0, 7]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))
N = sum(SIZES)
ALL = tuple(SIZES)
CPU = torch.device("cpu")

VARIANTS = {
    "basic": {},
    "alpha 1": {"alpha": 1.0},
    "alpha 2": {"alpha": 2.0, "zeta": 0.97},
    "feedback": {"alpha": 1.0, "feedback": True},
    "unbiased": {"alpha": 1.0, "rounding": "unbiased"},
    "unbiased feedback": {"alpha": 1.0, "rounding": "unbiased", "feedback": True},
    "hybrid": {"alpha": 1.0, "tau": 0.01},
    "hybrid alpha 2": {"alpha": 2.0, "tau": 0.1},
    "floor": {"alpha": 1.0, "floor": 0.05},
    "threshold": {"alpha": 0.0, "floor": 0.1},
    "momentum": {"alpha": 0.02, "momentum": 0.9, "zeta": 0.97},
    "momentum unbiased": {"alpha": 0.5, "momentum": 0.5, "rounding": "unbiased"},
}


def gradients(step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    """A gradient and its second moment as samples make them, over many binades, some elements without noise."""
    random = np.random.default_rng(step)
    scale = 10.0 ** random.uniform(-3, 0, N)
    each = (
        (random.normal(0.1, 1, (samples, N)) * np.random.default_rng(7).choice([0, 1, 1, 1], N) + 0.02)
        * scale
        / samples
    )
    return torch.tensor(each.sum(0), dtype=torch.float32), torch.tensor((each**2).sum(0), dtype=torch.float32)


def decoded(vgc: VGC, message: Tensor, context: Context) -> Tensor:
    out = torch.full((context.layout.numel,), 7.0)
    vgc.decode(message[None], out, context)
    return out


@pytest.mark.parametrize("wire", ["compact", "words"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_element_of_many_steps_is_that_of_the_specification(options, wire):
    vgc, worker = VGC(**options, wire=wire), Worker(SIZES, **options)
    state = vgc.init(LAYOUT, CPU)
    n_sent = 0
    for step in range(60):
        grad, moment = gradients(step)
        context = Context(LAYOUT, step, capacity=ALL)
        message = vgc.encode(grad, moment, state, context)
        expected = worker.step(grad.numpy(), moment.numpy())
        out = decoded(vgc, message.data, context)
        assert {i: out[i].item() for i in out.nonzero().flatten().tolist()} == {
            i: float(x) for i, x in expected.items()
        }
        assert torch.equal(state.residual, torch.tensor(np.array(worker.r)))
        if vgc.alpha:
            assert torch.equal(state.variance, torch.tensor(np.array(worker.v)))
        if vgc.momentum:
            assert torch.equal(state.velocity, torch.tensor(np.array(worker.u)))
        assert int(message.sent.sum()) == len(expected)
        n_sent += len(expected)
    assert 60 < n_sent < 60 * N * 0.9  # neither nothing nor everything


def test_the_worked_example():
    r = torch.tensor([0.04, 0.31, -6.25, 22.25, -35.75])
    layout = Layout.of([("one", (5,))])
    vgc, context = VGC(alpha=1.0, wire="words"), Context(layout, 0, capacity=(5,))
    state = vgc.init(layout, CPU)
    message = vgc.encode(r, torch.zeros(5), state, context)
    assert decoded(vgc, message.data, context).tolist() == [0.0, 0.25, -8.0, 16.0, -32.0]
    assert state.residual.tolist() == [pytest.approx(0.04), 0, 0, 0, 0]  # d = 10: not sent, nothing lost
    codes = message.data[-5:-1].long() & 0xFFFFFFFF
    assert [(int(word) >> 31, int(word) >> 28 & 7, int(word) & 0xFFFFFFF) for word in codes] == [
        (0, 7, 1),
        (1, 2, 2),
        (0, 1, 3),
        (1, 0, 4),
    ]


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from(["paper", "unbiased"]),
)
@settings(max_examples=200, deadline=None)
def test_conservation_and_error_bounds_for_any_numbers(numbers, feedback, rounding):
    """What is decoded and what is left is what there was; a sent value is within half a binade of its element."""
    r = torch.tensor(numbers)
    layout = Layout.of([("one", (len(numbers),))])
    vgc, context = VGC(alpha=1.0, feedback=feedback, rounding=rounding), Context(layout, 0, capacity=(len(numbers),))
    state = vgc.init(layout, CPU)
    message = vgc.encode(r, torch.zeros_like(r), state, context)
    out = decoded(vgc, message.data, context)
    sent = out != 0
    assert torch.equal(state.residual[~sent], r[~sent])
    if feedback:
        assert torch.equal((out.double() + state.residual.double()).float(), r)
        assert torch.equal(out.double() + state.residual.double(), r.double())
    ratio = out[sent] / r[sent]
    assert bool((ratio > 0.5).all())
    assert bool((ratio < 1.42).all())
    if r.abs().max() > 2.0**-63:  # below it r^2 is zero in float32
        assert bool(sent[r.abs().argmax()])  # the largest always goes


def test_a_tie_goes_up_and_above_the_largest_binade_is_cut():
    r = torch.tensor([1.5, 1.4999999, 3.0, 3.9, -1.5])
    layout = Layout.of([("one", (5,))])
    vgc, context = VGC(alpha=1.0), Context(layout, 0, capacity=(5,))
    message = vgc.encode(r, torch.zeros(5), vgc.init(layout, CPU), context)
    assert decoded(vgc, message.data, context).tolist() == [2.0, 1.0, 2.0, 2.0, -2.0]


def test_one_sample_alone_is_ambiguous_at_alpha_one():
    """r^2 == v exactly when one sample touched the element: strictly greater is asked for, so it waits."""
    c = torch.tensor([0.3, -0.7, 0.01])
    layout = Layout.of([("one", (3,))])
    vgc, context = VGC(alpha=1.0), Context(layout, 0, capacity=(3,))
    state = vgc.init(layout, CPU)
    assert int(vgc.encode(c, c * c, state, context).sent.sum()) == 0
    assert int(vgc.encode(c, c * c, state, context).sent.sum()) == 3  # seen twice: 4 c^2 > 2 c^2


def test_denormals_are_never_sent_and_never_lost():
    r = torch.tensor([1e-39, 2.0**-126, -1e-40])
    layout = Layout.of([("one", (3,))])
    vgc, context = VGC(alpha=1.0), Context(layout, 0, capacity=(3,))
    state = vgc.init(layout, CPU)
    # r^2 underflows to zero, and 0 > 0 is false: nothing goes, everything stays
    assert int(vgc.encode(r, torch.zeros(3), state, context).sent.sum()) == 0
    assert torch.equal(state.residual, r)


@pytest.mark.parametrize("room", [0, 1, 5, 20])
@pytest.mark.parametrize("step", [0, 3])
def test_capacity_takes_the_largest_binades_and_the_rest_waits(room, step):
    grad = torch.randn(N) * torch.logspace(-2, 2, N)[torch.randperm(N)]
    vgc, capacity = VGC(alpha=1.0, feedback=True), tuple(min(room, size) for size in SIZES)
    free, tight = vgc.init(LAYOUT, CPU), vgc.init(LAYOUT, CPU)
    zero = torch.zeros(N)
    everything = decoded(vgc, vgc.encode(grad, zero, free, wide := Context(LAYOUT, step, ALL)).data, wide)
    message = vgc.encode(grad, zero, tight, narrow := Context(LAYOUT, step, capacity))
    out = decoded(vgc, message.data, narrow)
    assert torch.equal(out[out != 0], everything[out != 0])  # the exponent is taken before the cut
    assert torch.equal(tight.residual[out == 0], grad[out == 0])
    n_cut = 0
    for slot in LAYOUT:
        values = slot.of(everything).tolist()
        passing = [i for i in range(slot.numel) if values[i]]
        binade = {i: math.log2(abs(values[i])) for i in passing}
        start = step * 0x9E3779B1 % max(1, slot.numel)
        order = sorted(passing, key=lambda i: (-binade[i], (i - start) % slot.numel))
        assert slot.of(out).nonzero().flatten().tolist() == sorted(order[:room])
        n_cut += len(passing) > room
    assert n_cut >= 1  # so it did bind


def test_capacity_loses_nothing_over_many_steps():
    vgc = VGC(alpha=1.0, feedback=True)
    state, total, arrived = vgc.init(LAYOUT, CPU), torch.zeros(N).double(), torch.zeros(N).double()
    for step in range(50):
        grad, moment = gradients(step)
        context = Context(LAYOUT, step, capacity=tuple(min(1, size) for size in SIZES))
        arrived += decoded(vgc, vgc.encode(grad, moment, state, context).data, context)
        total += grad
    assert torch.allclose(arrived + state.residual, total, rtol=1e-5, atol=1e-6)  # r is a float32 sum of 50 terms


def test_a_tensor_without_a_gradient_is_left_alone():
    active = torch.tensor([True, False, True, False, True, True])
    vgc = VGC(alpha=1.0)
    state = vgc.init(LAYOUT, CPU)
    grad, moment = gradients(0)
    vgc.encode(grad, moment * 100, state, Context(LAYOUT, 0, ALL))
    before = (state.residual.clone(), state.variance.clone())
    message = vgc.encode(grad, moment * 0, state, Context(LAYOUT, 1, ALL, active))
    live = LAYOUT.spread(active)
    for now, old in zip((state.residual, state.variance), before, strict=True):
        assert torch.equal(now[~live], old[~live])
        assert not torch.equal(now[live], old[live])
    arrival = vgc.decode(message.data[None], torch.empty(N), Context(LAYOUT, 1, ALL, active))
    assert [count >= 0 for count in arrival.passed] == active.tolist()


def test_a_zero_gradient_still_decays():
    vgc = VGC(alpha=2.0, zeta=0.5)
    state = vgc.init(LAYOUT, CPU)
    state.variance.fill_(8.0)
    vgc.encode(torch.zeros(N), torch.zeros(N), state, Context(LAYOUT, 0, ALL))
    assert state.variance.eq(4.0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["grad", "moment"])
def test_a_bad_value_adds_nothing_and_is_flagged(bad, where):
    vgc = VGC(alpha=1.0)
    clean, dirty = vgc.init(LAYOUT, CPU), vgc.init(LAYOUT, CPU)
    grad, moment = gradients(0)
    spoiled = {"grad": grad.clone(), "moment": moment.clone()}
    spoiled[where][5] = bad
    context = Context(LAYOUT, 0, ALL)
    good = vgc.encode(grad, moment, clean, context)
    message = vgc.encode(spoiled["grad"], spoiled["moment"], dirty, context)
    assert vgc.decode(good.data[None], torch.empty(N), context).finite
    assert not vgc.decode(message.data[None], torch.empty(N), context).finite
    message.undo()
    good.undo()
    others = torch.arange(N) != 5
    assert torch.equal(dirty.residual[others], clean.residual[others])
    assert dirty.residual[5] == 0
    assert dirty.variance[5] == 0


def test_undo_gives_every_sent_element_its_r_and_v_back_bit_for_bit():
    vgc = VGC(alpha=1.0)
    state = vgc.init(LAYOUT, CPU)
    for step in range(3):
        grad, moment = gradients(step)
        old = state.residual + grad, state.variance + moment
        message = vgc.encode(grad, moment, state, Context(LAYOUT, step, ALL))
    sent = (state.residual == 0) & (old[0] != 0)
    assert 0 < int(sent.sum()) < N
    message.undo()
    assert torch.equal(state.residual, old[0])
    assert torch.equal(state.variance[sent], old[1][sent])


def test_messages_of_several_workers_are_added_in_rank_order_and_divided():
    vgc, messages, total = VGC(alpha=1.0), [], torch.zeros(N)
    third = torch.tensor(1 / 3, dtype=torch.float32)  # before the sum, as DDP does it
    context = Context(LAYOUT, 0, ALL)
    for rank in range(3):
        grad, moment = gradients(rank)
        messages.append(vgc.encode(grad, moment, vgc.init(LAYOUT, CPU), context).data)
        total += decoded(vgc, messages[-1], context) * third
    out = torch.empty(N)
    vgc.decode(torch.stack(messages), out, context)
    assert torch.equal(out, total)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"alpha": -1}, "alpha must be >= 0"),
        ({"alpha": math.nan}, "alpha must be a finite number"),
        ({"alpha": 0}, "alpha = 0 without a floor"),
        ({"zeta": 0}, "zeta must be in"),
        ({"zeta": 1.1}, "zeta must be in"),
        ({"zeta": math.nan}, "zeta must be a finite"),
        ({"tau": 0.0}, "tau must be > 0"),
        ({"tau": math.inf}, "tau must be a finite"),
        ({"tau": 0.1, "floor": 0.1}, "exclude each other"),
        ({"floor": -1}, "floor must be >= 0"),
        ({"tau": 0.1, "feedback": True}, "leave them out"),
        ({"tau": 0.1, "rounding": "unbiased"}, "leave them out"),
        ({"rounding": "up"}, "paper, unbiased"),
        ({"wire": "zip"}, "compact, words"),
        ({"density": 0.0}, r"VGC: density must be in \(0, 1\], got 0.0"),
        ({"density": 1.1}, "density must be in"),
        ({"density": -0.1}, "density must be in"),
        ({"density": math.nan}, "density must be a finite"),
        ({"density": 0.1, "tau": 0.1}, r"tau \(0.1\) and density \(0.1\) exclude each other"),
        ({"density": 0.1, "alpha": -1}, "alpha must be >= 0"),
    ],
)
def test_wrong_hyper_parameters_say_what_is_wrong(options, text):
    with pytest.raises(ValueError, match=text):
        VGC(**options)


def test_the_papers_own_and_the_repr():
    assert VGC.paper(2.0) == VGC(
        alpha=2.0, zeta=0.999, tau=None, floor=0.0, feedback=False, rounding="paper", wire="words"
    )
    for vgc in (VGC(alpha=1.0, tau=0.1), VGC(alpha=0.0, density=0.005)):
        assert eval(repr(vgc)) == vgc
    assert from_spec("vgc:alpha=0.5,density=0.005") == VGC(alpha=0.5, density=0.005)

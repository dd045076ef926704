"""SignSGD element by element against scalar Python: error feedback, no memory, the vote; zeros; wrong messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import SignSGD
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from methods.test_contract import resealed

SHAPES: list[tuple[int, ...]] = [(33,), (4, 9), (), (0,), (65,)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
VOTE = SignSGD(feedback=False, vote=True)


def gradient(step: int, rank: int = 0) -> Tensor:
    random = np.random.default_rng([step, rank])
    grad = random.normal(0.1, 1, LAYOUT.numel) * 10.0 ** random.uniform(-3, 0, LAYOUT.numel)
    grad[::11] = 0
    return torch.tensor(grad, dtype=torch.float32)


def sign(x: float, step: int) -> int:
    return (1 if x > 0 else -1) if x != 0 else (-1) ** step


@pytest.mark.parametrize("feedback", [True, False])
def test_every_element_of_many_steps_is_that_of_the_paper(feedback: bool) -> None:
    ranks = InProcess(SignSGD(feedback=feedback), LAYOUT)
    r = [0.0] * LAYOUT.numel
    for step in range(20):
        grad = gradient(step)
        p = [a + b for a, b in zip(r, grad.tolist(), strict=True)]
        sent = [0.0] * LAYOUT.numel
        for slot in LAYOUT:
            places = range(slot.offset, slot.offset + slot.numel)
            mean = math.fsum(abs(p[i]) for i in places) / max(1, slot.numel)
            for i in places:
                sent[i] = mean * sign(p[i], step)
        torch.testing.assert_close(ranks([grad]).mean, torch.tensor(sent), rtol=1e-5, atol=1e-6)
        if feedback:
            r = [a - b for a, b in zip(p, sent, strict=True)]
            torch.testing.assert_close(ranks.states[0].residual, torch.tensor(r), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_the_vote_is_the_sign_of_most(workers: int) -> None:
    ranks = InProcess(VOTE, LAYOUT, workers)
    seen = set()
    for step in range(6):
        grads = [gradient(step, rank) for rank in range(workers)]
        votes = [sum(sign(float(grad[i]), step) for grad in grads) for i in range(LAYOUT.numel)]
        expected = torch.tensor([float(np.sign(vote)) for vote in votes])
        mean = ranks(grads).mean
        assert torch.equal(mean, expected)
        seen |= set(mean.tolist())
    assert seen == ({-1.0, 1.0} if workers % 2 else {-1.0, 0.0, 1.0})


def test_a_tensor_of_zeros_does_not_vote() -> None:
    grads = [gradient(0, rank) for rank in range(3)]
    for grad in grads[1:]:
        LAYOUT.slots[0].of(grad).zero_()
    LAYOUT.slots[1].of(grads[0]).zero_()
    mean = InProcess(VOTE, LAYOUT, 3)(grads).mean
    first, second = LAYOUT.slots[0], LAYOUT.slots[1]
    assert torch.equal(first.of(mean), torch.where(first.of(grads[0]) < 0, -1.0, 1.0))
    both = second.of(grads[1]).ge(0).float() + second.of(grads[2]).ge(0).float() - 1
    assert torch.equal(second.of(mean), both)


def test_a_tensor_without_a_gradient_does_not_vote() -> None:
    active = torch.tensor([False, True, True, True, False])
    mean = InProcess(VOTE, LAYOUT, 2)([gradient(0)] * 2, active=active).mean
    idle = ~LAYOUT.spread(active)
    assert not mean[idle].any()
    assert bool(mean[~idle].all())


@pytest.mark.parametrize("compressor", [SignSGD(feedback=False), VOTE])
def test_zeros_among_others_go_nowhere_in_two_steps(compressor: SignSGD) -> None:
    """Unused rows of an embedding would drift otherwise."""
    layout = Layout.of([("embedding", (40, 8))])
    grad = torch.zeros(40, 8)
    grad[:3] = torch.tensor([1.0, -2.0, 1.5]).view(3, 1)
    ranks = InProcess(compressor, layout)
    total = sum(ranks([grad.flatten()]).mean for _ in range(2)).view(40, 8)
    assert not total[3:].any()
    assert bool((total[:3].sign() == grad[:3].sign()).all())


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_scale_that_cannot_be_is_refused(scale: float) -> None:
    ranks = InProcess(SignSGD(), LAYOUT, 2)
    context = ranks.context()
    messages = torch.stack([SignSGD().encode(gradient(0), gradient(0), state, context).data for state in ranks.states])
    messages[1, 12] = torch.tensor(scale).view(torch.int32)
    resealed(messages[1])
    with pytest.raises(MessageError, match="rank 1 does not hold"):
        SignSGD().decode(messages, torch.empty(LAYOUT.numel), context)


@pytest.mark.parametrize(("compressor", "words"), [(SignSGD(), 5), (SignSGD(feedback=False), 5), (VOTE, 1)])
def test_one_bit_an_element_and_a_word_a_tensor(compressor: SignSGD, words: int) -> None:
    assert compressor.body_words(LAYOUT) == words + -(-LAYOUT.numel // 32)


@pytest.mark.parametrize("compressor", [SignSGD(), SignSGD(feedback=False), VOTE])
def test_what_it_says_it_sent(compressor: SignSGD) -> None:
    ranks = InProcess(compressor, LAYOUT)
    context = ranks.context()
    message: Any = compressor.encode(gradient(0), gradient(0), ranks.states[0], context)
    out = torch.empty(LAYOUT.numel)
    compressor.decode(message.data[None], out, context)
    assert float(message.sent_norm) == pytest.approx(float(out.abs().sum()), rel=1e-5)
    assert compressor.holds_back == compressor.feedback == hasattr(ranks.states[0], "residual")


def test_a_vote_holds_nothing_back() -> None:
    with pytest.raises(ValueError, match="SignSGD\\(feedback=False, vote=True\\)"):
        SignSGD(vote=True)

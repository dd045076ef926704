"""OneBit element by element against scalar Python; columns of one sign, of zeros; wrong messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import OneBit
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from methods.test_contract import resealed

SHAPES: list[tuple[int, ...]] = [(33,), (4, 3, 3), (), (0, 2), (5, 17)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))


def columns(layout: Layout) -> list[range]:
    found = []
    for slot in layout:
        n_columns = slot.shape[0] if len(slot.shape) > 1 else 1
        length = slot.numel // max(1, n_columns)
        found += [
            range(begin, begin + length) for begin in range(slot.offset, slot.offset + slot.numel, max(1, length))
        ]
    return found


def gradient(step: int) -> Tensor:
    random = np.random.default_rng(step)
    grad = random.normal(0.1, 1, LAYOUT.numel) * 10.0 ** random.uniform(-3, 0, LAYOUT.numel)
    grad[::11] = 0
    return torch.tensor(grad, dtype=torch.float32)


def mean(values: list[float]) -> float:
    return math.fsum(values) / max(1, len(values))


def test_every_element_of_many_steps_is_that_of_the_paper() -> None:
    ranks = InProcess(OneBit(), LAYOUT)
    r = [0.0] * LAYOUT.numel
    for step in range(20):
        grad = gradient(step)
        p = [a + b for a, b in zip(r, grad.tolist(), strict=True)]
        sent = [0.0] * LAYOUT.numel
        for column in columns(LAYOUT):
            high, low = (mean([p[i] for i in column if (p[i] < 0) == below]) for below in (False, True))
            for i in column:
                sent[i] = low if p[i] < 0 else high
        torch.testing.assert_close(ranks([grad]).mean, torch.tensor(sent), rtol=1e-5, atol=1e-6)
        r = [a - b for a, b in zip(p, sent, strict=True)]
        torch.testing.assert_close(ranks.states[0].residual, torch.tensor(r), rtol=1e-5, atol=1e-5)


def test_columns_of_zeros_and_of_one_sign() -> None:
    layout = Layout.of([("weight", (4, 3))])
    grad = torch.tensor([[0.0, 0, -0.0], [1, 2, 3], [-1, -2, -3], [0, 0, -6]])
    ranks = InProcess(OneBit(), layout)
    sent = torch.tensor([[0.0, 0, 0], [2, 2, 2], [-2, -2, -2], [0, 0, -6]])
    assert torch.equal(ranks([grad.flatten()]).mean, sent.flatten())
    assert torch.equal(ranks.states[0].residual, (grad - sent).flatten())


def test_a_vector_is_one_column() -> None:
    done = InProcess(OneBit(), Layout.of([("bias", (4,))]))([torch.tensor([1.0, 3, -1, -5])])
    assert done.mean.tolist() == [2, 2, -3, -3]
    assert OneBit().body_words(Layout.of([("bias", (4,))])) == 3


def test_one_bit_an_element_and_two_words_a_column() -> None:
    assert OneBit().body_words(LAYOUT) == 2 * len(columns(LAYOUT)) + -(-LAYOUT.numel // 32)


@pytest.mark.parametrize(("place", "value"), [(0, -1.0), (0, math.nan), (11, 1.0), (11, -math.inf)])
def test_means_that_cannot_be_are_refused(place: int, value: float) -> None:
    ranks = InProcess(OneBit(), LAYOUT)
    context = ranks.context()
    message = OneBit().encode(gradient(0), gradient(0), ranks.states[0], context).data
    message[10 + place] = torch.tensor(value).view(torch.int32)
    resealed(message)
    with pytest.raises(MessageError, match="rank 0 does not hold"):
        OneBit().decode(message[None], torch.empty(LAYOUT.numel), context)


def test_what_it_says_it_sent() -> None:
    ranks = InProcess(OneBit(), LAYOUT)
    context = ranks.context()
    message = OneBit().encode(gradient(0), gradient(0), ranks.states[0], context)
    out = torch.empty(LAYOUT.numel)
    OneBit().decode(message.data[None], out, context)
    assert float(message.sent_norm) == pytest.approx(float(out.abs().sum()), rel=1e-5)

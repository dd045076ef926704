"""QSGD by its definition, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradwire import QSGD
from gradwire.arithmetic import draws
from gradwire.codec import fields, reference
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.qsgd import definition as qsgd
from methods.exchanged import bytes_and_mean

CPU = torch.device("cpu")
LAYOUT = Layout.of([("matrix", (31, 33)), ("empty", (0, 4)), ("scalar", ()), ("vector", (513,)), ("last", (3,))])
METHODS = [QSGD(), QSGD(2, 128), QSGD(3, 512, seed=7), QSGD(4, 100, norm="max"), QSGD(8, 1), QSGD(5, 7, "max")]


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(LAYOUT.numel, generator=generator) * torch.rand(LAYOUT.numel, generator=generator)
    grad[3], grad[100:228] = 0.0, 0.0
    return grad


def oracle(method: QSGD, grad: Tensor, step: int, rank: int) -> list[float]:
    """The paper's equation in Python's own numbers: norm * sign * level / s."""
    chances = draws.uniform(method.seed, step, LAYOUT, CPU, rank).tolist()
    values, s, decoded = grad.tolist(), 2 ** (method.bits - 1) - 1, []
    for slot in LAYOUT:
        for begin in range(slot.offset, slot.offset + slot.numel, method.group):
            group = range(begin, min(begin + method.group, slot.offset + slot.numel))
            sizes = [abs(values[i]) for i in group]
            norm = max(sizes) if method.norm == "max" else math.sqrt(math.fsum(size**2 for size in sizes))
            for i in group:
                exact = abs(values[i]) / norm * s if norm else 0.0
                level = math.floor(exact) + (chances[i] < exact - math.floor(exact))
                decoded.append(math.copysign(norm * level / s, values[i]))
    return decoded


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_element_is_as_the_paper_says(method):
    """Float32 may round a level that is within 1e-6 of a draw the other way: none of these few is."""
    for step in range(3):
        ranks = InProcess(method, LAYOUT)
        ranks.number = step
        decoded = ranks([gradient(step)]).mean
        expected = torch.tensor(oracle(method, gradient(step), step, 0))
        torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0)


def extreme() -> Tensor:
    grad = gradient(9)
    grad[:4] = torch.tensor([3.4e38, -3.4e38, 1e-45, 1.0])
    grad[1023:1100] = torch.linspace(-1e-42, 1e-42, 77)  # denormals alone in their group
    return grad


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compiled_and_plain_are_the_same_bits(monkeypatch, method, n_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    layout = Layout.of([("matrix", (300, 512)), *((slot.name, slot.shape) for slot in LAYOUT)])
    grads = [torch.cat([torch.randn(300 * 512) * 1e-3, part]) for part in (gradient(1), extreme())]
    compiled = bytes_and_mean(method, grads, layout)
    monkeypatch.setattr(qsgd, "numba_ready", lambda device: False)
    for one, two in zip(compiled, bytes_and_mean(method, grads, layout), strict=True):
        assert torch.equal(one, two)


def test_the_bytes():
    """Two groups of two and one of one, 4 bits: the norms, then the first element in the lowest bits."""
    method, layout = QSGD(4, 2, "max"), Layout.of([("a", (3,)), ("b", (2,))])
    body = method.encode(torch.tensor([7.0, -3.0, 2.0, 0.0, -0.5]), None, None, Context(layout, 0)).data[10:]
    assert body.view(torch.float32)[:3].tolist() == [7.0, 2.0, 0.5]
    assert body[3:].tolist() == [0xF07B7]
    assert len(body) == method.body_words(layout)


def test_ranks_round_independently():
    """So that the mean over W ranks has a W-th of the variance; with the same draws it would have all of it."""
    layout = Layout.of([("weight", (20000,))])
    grad, n_ranks = torch.randn(20000, generator=torch.Generator().manual_seed(0)), 8
    errors = [float((InProcess(QSGD(), layout, n)([grad] * n).mean - grad).square().sum()) for n in (1, n_ranks)]
    assert 0.9 / n_ranks < errors[1] / errors[0] < 1.1 / n_ranks


def test_sent_norm_is_what_was_sent():
    for method in METHODS:
        context = Context(LAYOUT, 0)
        message = method.encode(gradient(0), None, None, context)
        method.decode(message.data[None], out := torch.empty(LAYOUT.numel), context)
        torch.testing.assert_close(message.sent_norm, out.abs().sum())


@pytest.mark.parametrize("norm", [torch.nan, torch.inf, -1.0])
def test_a_norm_that_cannot_be_is_refused(norm):
    method, context = QSGD(), Context(LAYOUT, 0)
    bodies = torch.stack([method.write(gradient(step), None, context).words for step in range(3)])
    bodies[1, 2] = torch.tensor(norm).view(torch.int32)
    assert method.read(bodies, context)[1].tolist() == [False, True, False]
    message = method.encode(gradient(0), None, None, context).data
    message[12], message[8:10] = bodies[1, 2], 0
    message[8:10] = reference.checksum(message)
    with pytest.raises(MessageError, match="rank 0 does not hold"):
        method.decode(message[None], torch.empty(LAYOUT.numel), context)


def test_words():
    assert QSGD().body_words(LAYOUT) == 2 + 1 + 1 + 2 + 1 + fields.n_words(LAYOUT.numel, 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 1}, r"bits must be from 2 \(a sign and one level\) to 8, got 1"),
        ({"bits": 9}, "got 9"),
        ({"group": 0}, "group must be >= 1 element, got 0"),
        ({"norm": "l1"}, "norm must be one of l2, max, got 'l1'"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        QSGD(**options)

"""TernGrad by its definition, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import TernGrad
from gradwire.arithmetic import draws
from gradwire.codec import reference
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.terngrad import definition as terngrad
from methods.exchanged import bytes_and_mean

CPU = torch.device("cpu")
LAYOUT = Layout.of([("matrix", (31, 33)), ("empty", (0, 4)), ("scalar", ()), ("vector", (513,)), ("last", (3,))])
METHODS = [TernGrad(), TernGrad(clip=None), TernGrad(clip=0.5, seed=3)]


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(LAYOUT.numel, generator=generator) * torch.rand(LAYOUT.numel, generator=generator) + 0.1
    grad[3] = 0.0
    return grad


def oracle(method: TernGrad, grad: Tensor, step: int) -> list[float]:
    """Clip, scale, and a coin for every element."""
    chances, decoded = draws.uniform(method.seed, step, LAYOUT, CPU).tolist(), []
    for slot in LAYOUT:
        values = slot.of(grad).double().numpy()
        bound = np.inf if method.clip is None or slot.numel < 2 else method.clip * np.std(values)
        cut = np.clip(values, -bound, bound)
        scale = np.abs(cut).max(initial=0)
        for i, value in enumerate(cut):
            decoded.append(scale * np.sign(value) if chances[slot.offset + i] < abs(value) / scale else 0.0)
    return decoded


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_element_is_as_the_paper_says(method):
    for step in range(3):
        ranks = InProcess(method, LAYOUT)
        ranks.number = step
        expected = torch.tensor(oracle(method, gradient(step), step), dtype=torch.float32)
        torch.testing.assert_close(ranks([gradient(step)]).mean, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compiled_and_plain_are_the_same_bits(monkeypatch, method, n_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    layout = Layout.of([("matrix", (600, 512)), *((slot.name, slot.shape) for slot in LAYOUT)])
    extreme = gradient(2)
    extreme[:4] = torch.tensor([3.4e38, -3.4e38, 1e-45, 1.0])
    extreme[-3:] = torch.tensor([1e-45, -1e-42, 0.0])
    grads = [torch.cat([torch.randn(600 * 512) * 1e-3 + 1.0, part]) for part in (gradient(1), extreme)]
    compiled = bytes_and_mean(method, grads, layout)
    monkeypatch.setattr(terngrad, "numba_ready", lambda device: False)
    for one, two in zip(compiled, bytes_and_mean(method, grads, layout), strict=True):
        assert torch.equal(one, two)


def test_the_bytes():
    """Elements of full size are always sent: 1 for plus, 2 for minus, five in a byte, padded to a word."""
    layout = Layout.of([("a", (7,)), ("b", (2,))])
    grad = torch.tensor([2.0, -2.0, 0.0, 2.0, -2.0, -2.0, 2.0, 0.5, -0.5])
    body = TernGrad(clip=None).encode(grad, None, None, Context(layout, 0)).data[10:]
    assert body[:2].view(torch.float32).tolist() == [2.0, 0.5]
    assert body[2:].view(torch.uint8).tolist() == [1 + 3 * 2 + 27 + 81 * 2, 2 + 3 * 1 + 9 * 1 + 27 * 2, 0, 0]


@pytest.mark.parametrize("value", [0.25, -1e-30, 3e38])
@pytest.mark.parametrize("numel", [1, 2, 5000])
def test_a_constant_tensor_is_not_clipped(value, numel):
    """It has no deviation: clipped to that, its parameter would never learn."""
    layout = Layout.of([("weight", (numel,))])
    grad = torch.full((numel,), value)
    assert torch.equal(InProcess(TernGrad(), layout)([grad]).mean, grad)


def test_the_deviation_is_not_lost_beside_a_large_mean():
    grad = 1000 + torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 1e-3
    layout = Layout.of([("weight", (5000,))])
    deviation = terngrad.deviations(grad, layout)
    assert abs(float(deviation) / np.std(grad.double().numpy()) - 1) < 1e-9


def test_ranks_round_independently():
    layout = Layout.of([("weight", (20000,))])
    grad, n_ranks = torch.randn(20000, generator=torch.Generator().manual_seed(0)), 8
    method = TernGrad(clip=None)
    errors = [float((InProcess(method, layout, n)([grad] * n).mean - grad).square().sum()) for n in (1, n_ranks)]
    assert 0.9 / n_ranks < errors[1] / errors[0] < 1.1 / n_ranks


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("byte", [243, 255])
def test_a_byte_that_is_no_five_trits_is_refused(monkeypatch, byte, compiled):
    if not compiled:
        monkeypatch.setattr(terngrad, "numba_ready", lambda device: False)
    method, context = TernGrad(), Context(LAYOUT, 0)
    message = method.encode(gradient(0), None, None, context).data
    message[20:].view(torch.uint8)[5] = byte
    message[8:10] = 0
    message[8:10] = reference.checksum(message)
    with pytest.raises(MessageError, match="rank 0 does not hold"):
        method.decode(message[None], torch.empty(LAYOUT.numel), context)


def test_sent_norm_is_what_was_sent():
    for method in METHODS:
        context = Context(LAYOUT, 0)
        message = method.encode(gradient(0), None, None, context)
        method.decode(message.data[None], out := torch.empty(LAYOUT.numel), context)
        torch.testing.assert_close(message.sent_norm, out.abs().sum())


@pytest.mark.parametrize("clip", [0, -1.0, float("inf"), float("nan")])
def test_wrong_options(clip):
    with pytest.raises(ValueError, match="clip must be > 0 standard deviations, or None for no clipping"):
        TernGrad(clip=clip)

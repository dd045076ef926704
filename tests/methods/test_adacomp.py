"""AdaComp element by element against the paper's definition, its room, its bytes, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import AdaComp
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from methods.test_contract import resealed
from methods.uneven import LAYOUT, N, gradient


class Worker:
    """The paper's algorithm 2, one element after another."""

    def __init__(self, length: int, convolution_length: int) -> None:
        self.r, self.length, self.convolution_length = np.zeros(N, np.float32), length, convolution_length

    def step(self, g: np.ndarray) -> np.ndarray:
        sent = np.zeros(N, np.float32)
        for slot in LAYOUT:
            length = self.length if len(slot.shape) < 3 else self.convolution_length
            end = slot.offset + slot.numel
            bins = [range(i, min(i + length, end)) for i in range(slot.offset, end, length)]
            largest = [max(abs(self.r[i] + g[i]) for i in places) for places in bins]
            scale = np.float32(sum(map(float, largest)) / max(1, len(bins)))
            for places, most in zip(bins, largest, strict=True):
                for i in places:
                    total = self.r[i] + g[i]
                    if abs(total + g[i]) >= most and total != 0:
                        sent[i] = scale if total > 0 else -scale
                    self.r[i] = total - sent[i]
        return sent


@pytest.mark.parametrize(("length", "convolution_length"), [(500, 50), (10, 7), (32, 1), (1, 1000)])
def test_every_element_of_many_steps_is_that_of_the_definition(length: int, convolution_length: int) -> None:
    ranks, worker = InProcess(AdaComp(length, convolution_length), LAYOUT), Worker(length, convolution_length)
    n_sent = 0
    for step in range(20):
        given = gradient(step)
        expected = worker.step(given.numpy())
        assert ranks([given]).mean.tolist() == expected.tolist()
        assert ranks.states[0].residual.tolist() == worker.r.tolist()
        n_sent += np.count_nonzero(expected)
    assert 20 * len(LAYOUT) / 2 < n_sent <= 20 * N


@pytest.mark.parametrize("share", [1, 4, 50])
def test_plain_torch_gives_the_same_bytes(plain_torch: Callable[[], None], share: int) -> None:
    """With room for all and for few, bad values, tensors without a gradient: as on a GPU."""
    two: list[list[Tensor]] = []
    for compiled in (True, False):
        if not compiled:
            plain_torch()
        ranks = InProcess(AdaComp(20, 5), LAYOUT)
        ranks.rooms = tuple(slot.numel // share for slot in LAYOUT)
        two.append([])
        for step in range(6):
            given, active = gradient(step), torch.tensor([True, True, True, step != 3, True, step != 4, True])
            if step == 4:
                given[::97] = torch.nan
            given = torch.where(LAYOUT.spread(active), given, 0.0)
            context = ranks.context(active if step in (3, 4) else None)
            message = ranks.compressor.encode(given, given, ranks.states[0], context)
            two[-1] += [message.data, ranks.states[0].residual.clone(), message.sent, message.passed]
            ranks.number += 1
            assert bool(message.data[5]) == (step != 4)
    assert all(torch.equal(one, other) for one, other in zip(*two, strict=True))


def test_what_has_no_room_waits_and_everybody_has_his_turn() -> None:
    """A bin of one element passes always: room for a fifth of them takes five steps and a little to go round."""
    layout = Layout.of([("one", (50,)), ("none", (3,)), ("two", (20,))])
    ranks, seen = InProcess(AdaComp(bin=1), layout), torch.zeros(73, dtype=torch.bool)
    ranks.rooms = (10, 0, 20)
    for step in range(40):
        before = ranks.states[0].residual.clone()
        given = torch.where(torch.arange(73) % 2 == 0, 1.0, -1.0)
        context = ranks.context()
        message = ranks.compressor.encode(given, given, ranks.states[0], context)
        assert message.passed is not None
        assert message.sent is not None
        assert message.passed.tolist() == pytest.approx([50, 3, 20], abs=20 if step else 0)  # r may come to 0
        assert message.sent.tolist() == torch.minimum(message.passed, torch.tensor(ranks.rooms)).tolist()
        out = torch.empty(73)
        ranks.compressor.decode(message.data[None], out, context)
        torch.testing.assert_close(out + ranks.states[0].residual, before + given)
        assert [int(part.count_nonzero()) for part in out.split([50, 3, 20])] == message.sent.tolist()
        message.undo()
        assert torch.equal(ranks.states[0].residual, before + given)
        ranks([given * 0])  # sends the same again
        seen |= out != 0
    assert bool(seen[:50].all())
    assert bool(seen[53:].all())
    assert not seen[50:53].any()


def test_the_mean_of_two_workers_is_that_of_their_own() -> None:
    two, single = InProcess(AdaComp(20), LAYOUT, 2), [InProcess(AdaComp(20), LAYOUT) for _ in range(2)]
    for step in range(3):
        grads = [gradient(step, rank) for rank in range(2)]
        own = [ranks([grad]).mean for ranks, grad in zip(single, grads, strict=True)]
        assert torch.equal(two(grads).mean, own[0] / 2 + own[1] / 2)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_wrong_scale_is_refused(value: float) -> None:
    ranks = InProcess(AdaComp(), LAYOUT)
    context, out = ranks.context(), torch.full((N,), 7.0)
    message = ranks.compressor.encode(gradient(0), gradient(0), ranks.states[0], context).data
    message[-2:-1].view(torch.float32).fill_(value)
    resealed(message)
    with pytest.raises(MessageError, match="rank 0 has a scale that is no number >= 0"):
        ranks.compressor.decode(message[None], out, context)
    assert bool((out == 7).all())


def test_numbers_near_the_end_of_float32() -> None:
    ranks = InProcess(AdaComp(), Layout.of([("one", (3,))]))
    for step in range(3):
        done = ranks([torch.tensor([3e38, -3e38, 1e-44])])
        assert bool(torch.isfinite(done.mean).all())
        assert bool(torch.isfinite(ranks.states[0].residual).all()), step


@pytest.mark.parametrize("options", [{"bin": 0}, {"bin": 2.5}, {"convolution_bin": -1}])
def test_wrong_options(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"AdaComp: {name} must be a whole number >= 1, got"):
        AdaComp(**options)

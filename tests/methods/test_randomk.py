"""RandomK element by element against scalar Python: the same places on every rank, in every step others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradwire import RandomK
from gradwire.arithmetic.shuffle import chosen
from gradwire.codec.quota import Quota
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context

CPU = torch.device("cpu")
SIZES = [33, 1, 31, 0, 64]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def test_every_element_of_several_steps() -> None:
    method, n_workers = RandomK(density=0.2, seed=5), 2
    ranks = InProcess(method, LAYOUT, n_workers)
    residuals = [torch.zeros(LAYOUT.numel) for _ in range(n_workers)]
    met = set()
    for step in range(8):
        grads = [gradient(step, rank) for rank in range(n_workers)]
        done = ranks(grads)
        places = chosen(5, step, Quota.of(LAYOUT, 0.2), CPU)[0].tolist()
        for slot in LAYOUT:
            within = [place for place in places if slot.offset <= place < slot.offset + slot.numel]
            assert len(set(within)) == len(within) == min(slot.numel, max(1, slot.numel // 5))
        met |= set(places)
        for i in range(LAYOUT.numel):
            for residual, grad in zip(residuals, grads, strict=True):
                residual[i] += grad[i]
            wanted = float(residuals[0][i] / 2 + residuals[1][i] / 2) if i in places else 0.0
            assert float(done.mean[i]) == wanted, (step, i)
            for residual in residuals:
                residual[i] = 0.0 if i in places else residual[i]
        for state, residual in zip(ranks.states, residuals, strict=True):
            assert torch.equal(state.residual, residual), step
    assert len(met) > 0.7 * LAYOUT.numel


def test_no_place_is_sent() -> None:
    """32 bits a sent element."""
    layout = Layout.of([("weight", (1000, 100))])
    done = InProcess(RandomK(density=0.01), layout, 2)([torch.ones(layout.numel)] * 2)
    assert done.n_bytes == 4 * 1000
    assert float(done.mean.sum()) == 1000


def test_a_bad_value_that_is_not_drawn_reaches_every_rank() -> None:
    for place in range(0, LAYOUT.numel, 7):
        ranks = InProcess(RandomK(density=0.01), LAYOUT, 2)
        bad = gradient(0, 0)
        bad[place] = torch.nan
        assert not ranks([gradient(0, 1), bad]).finite


def test_one_rank_without_a_gradient_sends_nothing_of_it() -> None:
    method, active = RandomK(density=1.0), torch.tensor([True, False, True, True, False])
    states = [method.init(LAYOUT, CPU) for _ in range(2)]
    states[1].residual += 3.0
    talks = [
        method.rounds(torch.ones(LAYOUT.numel), state, Context(LAYOUT, 0, active=mask, world_size=2))
        for state, mask in zip(states, (None, active), strict=True)
    ]
    total = sum(next(talk) for talk in talks)
    with pytest.raises(StopIteration) as end:
        talks[0].send(total)
    idle = ~LAYOUT.spread(active)
    assert torch.equal(end.value.value.mean, torch.where(idle, 0.5, 2.5))
    assert torch.equal(states[1].residual, torch.where(idle, 3.0, 0.0))


@pytest.mark.parametrize("density", [0.0, -1.0, 1.1, math.nan])
def test_wrong_options_are_refused(density: float) -> None:
    options: dict[str, Any] = {"density": density}
    with pytest.raises(ValueError, match=r"RandomK: density must be in \(0, 1\], got"):
        RandomK(**options)

"""A byte budget or a density of virtual workers: bits and bytes of real ones, batched or not, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
import scenes
from budgeted import BUDGET, counted, wide
from gradwire import VGC
from gradwire.errors import AttachError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x), y)


def simulated(compressor: Any, workers: int, n_steps: int, **options: Any) -> tuple[list[str], Any]:
    model = wide()
    simulation = gradwire.simulate(model, compressor, loss, workers=workers, **options)
    optimizer, prints = scenes.sgd(model), []
    for step in range(n_steps):
        every = [scenes.batch(step, rank) for rank in range(workers)]
        simulation.backward(*(torch.stack(part) for part in zip(*every, strict=True)))
        optimizer.step()
        prints.append(scenes.digest(model.parameters()))
    return prints, simulation


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("method", [BUDGET, VGC(alpha=0.5, density=0.05)], ids=["budget", "density"])
def test_virtual_workers_have_the_bits_and_bytes_of_real_ones(spawn, messages, method):
    n_bytes, stats, prints = spawn(2, counted, method, 6, {"bucket_cap_mb": None})[0]
    torch.set_num_threads(1)
    ours, simulation = simulated(method, 2, 6, messages=messages)
    assert ours == prints
    assert simulation.stats().bytes_sent == sum(n_bytes) == stats.bytes_sent


def test_what_virtual_workers_refuse():
    with pytest.raises(AttachError, match="a rate means nothing: give max_bytes_per_step"):
        simulated(VGC(budget="5Mbit/s"), 2, 1)
    with pytest.raises(AttachError, match="a step needs at least"):
        simulated(VGC(max_bytes_per_step=100), 2, 1)
    _, simulation = simulated(BUDGET, 2, 1)
    with pytest.raises(AttachError, match="a step needs at least"):
        simulation.compressor = VGC(max_bytes_per_step=100)
    with pytest.raises(AttachError, match="a rate means nothing"):
        simulation.compressor = VGC(budget="5Mbit/s")
    assert simulation.compressor == BUDGET


def test_batched_is_one_by_one_and_a_front_may_change_the_budget() -> None:
    layout = Layout.of([("a", (37, 29)), ("b", (5,)), ("empty", (0, 4)), ("c", (64, 33)), ("d", (1,))])
    both = [
        InProcess(replace(BUDGET, max_bytes_per_step=900), layout, 3, planned=True, batched=kind)
        for kind in (True, False)
    ]
    for step in range(6):
        most = 900 - 100 * step
        generator = torch.Generator().manual_seed(step)
        samples = torch.randn(3, 4, layout.numel, generator=generator)
        done = []
        for ranks in both:
            ranks.use(replace(BUDGET, max_bytes_per_step=most))
            done.append(ranks.exchange(samples.sum(1), samples.square().sum(1)))
        assert torch.equal(done[0].mean, done[1].mean)
        assert 0.9 * most <= done[0].n_bytes == done[1].n_bytes <= most

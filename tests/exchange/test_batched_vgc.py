"""All workers at once: the bits, the counts and the lengths of messages that are written and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import VGC, Strom
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout

LAYOUT = Layout.of([("a", (37, 29)), ("b", (5,)), ("empty", (0, 4)), ("c", (64, 33)), ("d", (1,))])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
METHODS = [
    VGC(alpha=1.0),
    VGC(alpha=1.5, wire="words"),
    VGC(alpha=1.0, feedback=True),
    VGC(alpha=0.5, rounding="unbiased", zeta=0.97),
    VGC(alpha=1.0, floor=0.3),
    VGC(alpha=0.5, density=0.05),
    VGC(alpha=2.0, tau=0.5),
    VGC(alpha=0.02, momentum=0.9),
    VGC(alpha=0.01, momentum=0.9, density=0.05),
    Strom(tau=0.7),
]


def gradients(step: int, workers: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(workers, 4, LAYOUT.numel, generator=generator) + 0.3
    return samples.sum(1).to(device), samples.square().sum(1).to(device)


def compare(batched: InProcess, apart: InProcess, grads: Tensor, moments: Tensor) -> None:
    found, wanted = (ranks.exchange(grads.clone(), moments) for ranks in (batched, apart))
    assert found.finite == wanted.finite
    assert found.n_bytes == wanted.n_bytes
    if found.finite:
        assert torch.equal(found.mean, wanted.mean)
    else:
        for done in (found, wanted):
            for undo in done.undo:
                undo()
    for ours, theirs in zip(batched.snapshot(), apart.snapshot(), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_batched_is_one_by_one(compressor: Any, workers: int, device: str) -> None:
    where = torch.device(device)
    batched, apart = (InProcess(compressor, LAYOUT, workers, True, where, batched=kind) for kind in (True, False))
    assert batched.batched is not None
    for step in range(14):
        grads, moments = gradients(step, workers, device)
        if step == 9:
            grads[-1, 40] = torch.inf
        compare(batched, apart, grads, moments)
    assert batched.capacity == apart.capacity
    ours, theirs = (ranks.meter.stats([]) for ranks in (batched, apart))
    assert (ours.elements_sent, ours.deferred, ours.bytes_sent) == (
        theirs.elements_sent,
        theirs.deferred,
        theirs.bytes_sent,
    )
    if getattr(compressor, "density", None) is not None and workers < 8:
        assert ours.dense_steps == 0
    elif workers < 8:  # so many have dense steps only of so small a model
        assert 0 < ours.dense_steps < ours.steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), *METHODS[-3:-1]], ids=repr)
def test_workers_that_take_no_part(compressor: Any, device: str) -> None:
    """Each has gradients of its own tensors; dense steps too."""
    where = torch.device(device)
    batched, apart = (InProcess(compressor, LAYOUT, 3, True, where, batched=kind) for kind in (True, False))
    for step in range(12):
        active = torch.rand(3, len(LAYOUT), generator=torch.Generator().manual_seed(step)) < 0.6
        active[step % 3] = False
        active = active.to(where)
        before = batched.snapshot()[step % 3]
        grads, moments = gradients(step, 3, device)
        found, wanted = (ranks.exchange(grads.clone(), moments, active) for ranks in (batched, apart))
        assert torch.equal(found.mean, wanted.mean)
        for ours, theirs in zip(batched.snapshot(), apart.snapshot(), strict=True):
            assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
        kept = zip(before, batched.snapshot()[step % 3], strict=True)
        assert all(torch.equal(one, two) for one, two in kept)
    assert batched.capacity == apart.capacity


def test_room_that_is_short() -> None:
    """Who waits is the same too."""
    batched, apart = (InProcess(VGC(alpha=1.0), LAYOUT, 8, batched=kind) for kind in (True, False))
    for ranks in (batched, apart):
        ranks.rooms = (20, 2, 0, 30, 1)
    for step in range(6):
        compare(batched, apart, *gradients(step, 8, "cpu"))
    assert batched.meter.stats([]).deferred > 1000


def test_other_methods_go_one_by_one() -> None:
    from gradwire import QSGD

    assert InProcess(QSGD(), LAYOUT, 2, batched=True).batched is None


def test_every_element_fits_where_rooms_do_not_bind() -> None:
    vgc = VGC(alpha=0.5, density=0.02)
    batched, apart = (InProcess(vgc, LAYOUT, 3, batched=kind) for kind in (True, False))
    for step in range(4):
        compare(batched, apart, *gradients(step, 3, "cpu"))

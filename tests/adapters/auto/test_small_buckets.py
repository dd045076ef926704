"""A step whose small buckets are summed beside the compressed ones: nothing of either is lost, on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import BF16, VGC, Dense
from gradwire.exchange.sums import SmallBuckets
from gradwire.methods.base import Sum

LIMIT = 200  # elements: of scenes.net the biases and norms, and not the matrices


def attached(method: Any, small: Sum | None) -> tuple[DistributedDataParallel, Any, torch.optim.Optimizer]:
    """Every parameter in a bucket of its own, after two steps with Dense in which DDP rebuilds them."""
    model = DistributedDataParallel(scenes.net(), bucket_cap_mb=scenes.TINY_BUCKETS)
    wire = gradwire.attach(model, Dense())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    advance(model, optimizer, range(2))
    wire._reducer.use(method, None if small is None else SmallBuckets(LIMIT, small))
    wire.reset_stats()
    return model, wire, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[list[Tensor]]:
    """The gradients that every step came to."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = scenes.batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return found


def first_step(small: Sum | None) -> list[Tensor]:
    model, _, optimizer = attached(VGC(alpha=1.0), small)
    advance(model, optimizer, range(2, 3))  # VGC's first step is dense
    return advance(model, optimizer, range(3, 4))[0]


def plain_step() -> list[Tensor]:
    model, _, optimizer = attached(Dense(), None)
    advance(model, optimizer, range(2, 3))
    return advance(model, optimizer, range(3, 4))[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_buckets_are_summed_and_large_ones_compressed(spawn, world_size):
    for mixed, compressed, plain in zip(
        spawn(world_size, first_step, Dense()),
        spawn(world_size, first_step, None),
        spawn(world_size, plain_step),
        strict=True,
    ):
        assert any(one.numel() <= LIMIT for one in plain)
        for ours, held_back, whole in zip(mixed, compressed, plain, strict=True):
            torch.testing.assert_close(ours, whole if whole.numel() <= LIMIT else held_back)
        assert any(not torch.equal(one, two) for one, two in zip(compressed, plain, strict=True))


def trained(steps: int) -> tuple[list[Tensor], int, int]:
    model, wire, optimizer = attached(VGC(alpha=1.0), BF16())
    advance(model, optimizer, range(2, 2 + steps))
    stats = wire.stats()
    return [p.detach().clone() for p in model.parameters()], stats.steps, wire.steps


def test_all_replicas_are_equal_and_every_step_is_counted_once(spawn):
    (first, counted, steps), *others = spawn(3, trained, 20)
    assert (counted, steps) == (20, 22)
    for parameters, *_ in others:
        assert all(torch.equal(one, two) for one, two in zip(first, parameters, strict=True))


def not_finite(rank: int) -> list[bool]:
    """Which gradients are not, when one of a large bucket is infinite on one rank."""
    model, _, optimizer = attached(VGC(alpha=1.0), Dense())
    advance(model, optimizer, range(2, 5))
    weight = next(p for p in model.parameters() if p.numel() > LIMIT)
    if dist.get_rank() == rank:
        weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    (grads,) = advance(model, optimizer, range(5, 6))
    return [not bool(torch.isfinite(grad).all()) for grad in grads]


@pytest.mark.filterwarnings("ignore:gradwire. a gradient of step")
def test_a_value_that_is_not_finite_reaches_the_small_buckets_too(spawn):
    for flags in spawn(2, not_finite, 1):
        assert all(flags)


def switched() -> list[float]:
    """Compressed, then mixed, then sums: what was held back of a small bucket is not left behind."""
    model, wire, optimizer = attached(VGC(alpha=4.0), None)
    advance(model, optimizer, range(2, 8))
    held = sum(float(one.abs().sum()) for one in wire._reducer.store.residuals())
    wire._reducer.use(VGC(alpha=4.0), SmallBuckets(LIMIT, Dense()))
    advance(model, optimizer, range(8, 12))
    still = wire.state_dict()["parameters"]
    small = sum(float(f["residual"].abs().sum()) for f in still.values() if f["residual"].numel() <= LIMIT)
    wire.compressor = Dense()
    advance(model, optimizer, range(12, 14))
    return [held, small, sum(float(one.abs().sum()) for one in wire._reducer.store.residuals())]


def test_what_a_small_bucket_holds_back_goes_out(spawn):
    for held, small, left in spawn(2, switched):
        assert held > 0
        assert small > 0  # it went on by messages, because a sum would have left it where it was
        assert left == 0

"""A byte budget for a step: the plan fits in whatever buckets, real processes keep it, and it survives a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
import scenes
from budgeted import BUDGET, counted, wide
from gradwire import VGC, Dense
from gradwire.exchange.room import DECADES, EACH, Capacity, above, density_at, most_buckets
from gradwire.layout import Layout
from gradwire.methods.base import Context
from scenes import interrupted, straight


def test_densities_ascend_to_one():
    every = [density_at(place) for place in range(0, DECADES * EACH + 1, 7)] + [density_at(DECADES * EACH)]
    assert every == sorted(set(every))
    assert (every[0], every[-1]) == (1e-9, 1.0)


def message_bytes(vgc: VGC, layouts: list[Layout], capacity: Capacity, most: int) -> int:
    """Of a step, as they are written."""
    plan = capacity.plan(vgc.words, most)
    assert not plan.dense
    return sum(4 * vgc.shape(Context(layout, 0, capacity.of(layout, plan))).words for layout in layouts)


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 200_000)), min_size=1, max_size=12),
    st.floats(0.0, 1.0),
    st.integers(1, 1 << 20),
    st.sampled_from(["compact", "words"]),
)
@settings(max_examples=60, deadline=None)
def test_messages_fit_in_whatever_buckets(sizes: list[int], part: float, limit: int, wire: str) -> None:
    """Buckets as DDP makes them; and nearly all of the budget is used where a tensor's share is not all in its head."""
    tensors = [torch.empty(size) for size in sizes]
    found = dist._compute_bucket_assignment_by_size(tensors, [limit])[0]
    layouts = [Layout.of((f"t{i}", (sizes[i],)) for i in bucket) for bucket in found]
    vgc, n_bytes = VGC(alpha=1.0, wire=wire), 4 * sum(sizes)
    assert len(found) <= most_buckets(n_bytes, limit=limit)
    capacity = Capacity(n_bytes, 2, {f"t{i}": size for i, size in enumerate(sizes)}, most_buckets(n_bytes, limit=limit))
    least = capacity.least(vgc.words)
    most = max(least, int(least + part * (n_bytes / 6)))
    sent = message_bytes(vgc, layouts, capacity, most)
    assert sent <= most
    assert sent <= max(least, n_bytes)  # no more than the all-reduce
    if 1000 * len(sizes) < most:
        assert sent >= 0.9 * most


def test_rooms_follow_what_passed() -> None:
    layout = Layout.of([("a", (10_000,)), ("b", (400,))])
    vgc, capacity = VGC(alpha=1.0), Capacity(41_600, 2, {"a": 10_000, "b": 400})
    plan = capacity.plan(vgc.words, 1000)
    assert plan.density is not None
    full = capacity.of(layout, plan)
    assert full == (above(int(plan.density * 10_000)), above(int(plan.density * 400)))
    capacity.note(layout, [10, int(plan.density * 400)])
    assert capacity.plan(vgc.words, 1000) == plan
    assert capacity.of(layout, plan) == (22, full[1])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("most", [1500, 5000])
@pytest.mark.parametrize("limit", [scenes.TINY_BUCKETS, 0.02, None])
def test_bytes_of_a_step(spawn, workers, most, limit):
    """A bucket a tensor, two buckets, one; the first step has other buckets than the rest."""
    results = spawn(workers, counted, VGC(alpha=0.5, max_bytes_per_step=most), 12, {"bucket_cap_mb": limit})
    for n_bytes, stats, prints in results:
        assert all(0.9 * most <= sent <= most for sent in n_bytes[1:]), n_bytes
        assert n_bytes[0] <= most
        assert stats.dense_steps == 0
        assert stats.deferred < 0.02 * sum(stats.elements_sent.values())
        assert prints == results[0][2]
        assert len(set(prints)) == len(prints)


def test_less_is_sent_where_less_passes(spawn):
    """alpha decides all the same; and then a budget changes nothing but the first steps, which would be dense."""
    for n_bytes, stats, _ in spawn(2, counted, VGC(alpha=6.0, max_bytes_per_step=8000), 12, {}):
        assert max(n_bytes[1:]) < 4000
        assert stats.dense_steps == 0
        assert stats.elements_sent["0.weight"] > 0


def test_buckets_and_their_rebuilding_change_nothing(spawn):
    """As long as there may be as many heads: ten tensors in ten buckets, in some, in one that is rebuilt late."""
    few = {"bucket_cap_mb": 5000 / (1 << 20)}  # as many buckets as tensors for all that is known; there are fewer
    runs = [{}, few, {**few, "find_unused_parameters": True}, {**few, "static_graph": True}]
    results = [spawn(2, counted, BUDGET, 8, options)[0] for options in runs]
    assert all(prints == results[0][2] for _, _, prints in results)
    assert len({tuple(n_bytes) for n_bytes, _, _ in results}) > 1  # they did have other heads


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_no_interruption(spawn, workers, stop):
    assert spawn(workers, interrupted, BUDGET, stop, 8, None) == spawn(workers, straight, BUDGET, 8)


def test_resume_through_a_distributed_checkpoint(spawn, tmp_path):
    assert spawn(2, interrupted, BUDGET, 3, 6, tmp_path / "wire") == spawn(2, straight, BUDGET, 6)


def switched() -> tuple[list[str], list[int], float]:
    model = scenes.ddp(wide())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    optimizer, prints, n_bytes = scenes.sgd(model), [], []
    methods = [BUDGET, replace(BUDGET, max_bytes_per_step=4000), VGC(alpha=1.0), VGC(budget="1Mbit/s"), BUDGET, Dense()]
    for number, method in enumerate(methods):
        prints += scenes.train(model, range(3 * number, 3 * number + 3), optimizer)
        wire.compressor = method
        wire.reset_stats()
        prints += scenes.train(model, range(50 + number, 51 + number), optimizer)
        n_bytes.append(wire.stats().bytes_sent)
    return prints, n_bytes, float(sum(r.abs().sum() for r in wire._reducer.store.residuals()))


def test_switching_to_and_from_a_budget(spawn):
    results = spawn(2, switched)
    for prints, n_bytes, left in results:
        assert prints == results[0][0]
        assert n_bytes[0] <= 1500
        assert 1500 < n_bytes[1] <= 4000
        assert n_bytes[3] <= 1000  # nothing is measured yet: the least
        assert n_bytes[4] <= 1500
        assert n_bytes[5] > 4 * 13_000  # what was held back goes along, densely
        assert left == 0

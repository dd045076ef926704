"""A method's own density: rooms follow from it, and no step is dense."""

from __future__ import annotations

import pytest

import scenes
from budgeted import counted
from gradwire import VGC
from gradwire.exchange.room import Capacity, RoomPlan, above
from gradwire.layout import Layout
from scenes import interrupted, straight

TWENTIETH = VGC(alpha=0.5, density=0.05)
LAYOUT = Layout.of([("a", (10_000,)), ("b", (400,))])


def capacity(workers: int) -> Capacity:
    return Capacity(41_600, workers, {"a": 10_000, "b": 400})


def test_rooms_follow_the_density_and_what_passed() -> None:
    here = capacity(2)
    plan = here.plan(TWENTIETH.words, None, TWENTIETH.density)
    assert plan == RoomPlan(dense=False, density=0.05)
    assert here.of(LAYOUT, plan) == (above(500), above(20))
    here.note(LAYOUT, [10, 20])
    assert here.plan(TWENTIETH.words, None, TWENTIETH.density) == plan
    assert here.of(LAYOUT, plan) == (22, above(20))


@pytest.mark.parametrize(("workers", "density"), [(32, 0.5), (128, 0.05)])
def test_it_never_costs_more_than_the_all_reduce(workers: int, density: float) -> None:
    """Then it is as if no density were given: dense at first, and later as much as may be sent."""
    vgc, here = VGC(alpha=0.5, density=density), capacity(workers)
    assert here.plan(vgc.words, None, density).dense
    assert not capacity(2).plan(vgc.words, None, density).dense


@pytest.mark.parametrize("limit", [scenes.TINY_BUCKETS, None])
def test_no_step_is_dense(spawn, limit):
    results = spawn(2, counted, TWENTIETH, 12, {"bucket_cap_mb": limit})
    for n_bytes, stats, prints in results:
        assert stats.dense_steps == 0
        assert n_bytes[0] <= max(n_bytes[1:]) < 1.25 * min(n_bytes[1:])  # the first may have fewer buckets
        assert stats.deferred < 0.02 * sum(stats.elements_sent.values())
        assert prints == results[0][2]


@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_no_interruption(spawn, stop):
    assert spawn(2, interrupted, TWENTIETH, stop, 8, None) == spawn(2, straight, TWENTIETH, 8)

"""Times of a worker by itself, scaled to what they are when all workers do the same and wait for the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradwire.plan.costs import MESSAGES
from gradwire.plan.model import Cost, Work

SCALE = (0.5, 8.0)  # what a lap may make of a time: beyond that it was disturbed


def crowded(
    work: Work,
    costs: Mapping[str, Cost],
    world_size: int,
    laps: Mapping[str, float],
    plain_ms: float,
    meetings: Mapping[str, float],
) -> tuple[Work, list[Cost]]:
    """A step is what a plain lap takes, a method what its lap takes beside the plain one.

    laps: from barrier to barrier, by method; plain_ms: without a method. At the barrier workers wait for the last one,
    which they do in a training too.
    meetings: ms of a lap's collectives, by method, as the model has them. What these take longer within the lap counts
    as the method's: some worker is late, and cores are busy.
    """
    before_ms = work.forward_ms + work.backward_ms
    by = min(max(plain_ms / work.compute_ms, 1.0), SCALE[1]) if work.compute_ms else 1.0
    names = ("forward_ms", "backward_ms", "after_ms")
    work = replace(work, **{name: by * getattr(work, name) for name in names})
    extra_ms = {spec: laps[spec] - plain_ms - meetings.get(spec, 0.0) for spec in costs}
    return work, [_scaled(cost, work, before_ms, by, world_size, extra_ms[spec]) for spec, cost in costs.items()]


def _scaled(cost: Cost, work: Work, before_ms: float, by: float, world_size: int, extra_ms: float) -> Cost:
    """Everything that the method adds to a step, so that it comes to `extra_ms`. A cast is too little to be seen so."""
    moments_ms = (cost.moments - 1) * before_ms
    own_ms = moments_ms + cost.encode_ms(work) + cost.decode_ms(work, min(world_size, MESSAGES))
    if cost.kind == "sum" or own_ms == 0:
        return cost
    scale = min(max(extra_ms / own_ms, SCALE[0]), SCALE[1])
    names = ("encode_ns", "decode_ns", "decode_message_ns", "overhead_ms")
    moments = 1 + scale * moments_ms / (by * before_ms) if before_ms else cost.moments
    return replace(cost, moments=moments, **{name: scale * getattr(cost, name) for name in names})

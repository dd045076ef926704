"""Times that are scaled to what all workers take together."""

from __future__ import annotations

import math

import pytest

from gradwire.plan.crowding import crowded
from gradwire.plan.model import Cost, Network, Work, predict

NONE: dict[str, float] = {}
WORK = Work((600_000, 400_000), 2.0, 3.0, 1.0, beside=0.0)
COSTS = {
    "bf16": Cost("bf16", "sum", 2.0, 0.0, 0.1, 0.1, 0.0, 0.0, 1.0),
    "topk": Cost("topk", "gather", 0.05, 40.0, 2.0, 1.0, 0.25, 0.5, 1.0),
    "vgc": Cost("vgc", "gather", 0.05, 40.0, 1.0, 0.5, 0.25, 0.25, 1.4),
}
# of themselves, with 4 messages: topk 2 x 0.5 + 2 + 1 + 4 x 0.25 = 5 ms, vgc 0.4 x 5 ms of moments + 3 = 5 ms


def test_a_lap_says_what_a_method_adds():
    meetings = {"topk": 6.0, "vgc": 5.0}
    laps = {"bf16": 13.0, "topk": 22.0 + 6.0, "vgc": 32.0 + 5.0}
    work, costs = crowded(WORK, COSTS, 4, laps, plain_ms=12.0, meetings=meetings)
    assert work.compute_ms == pytest.approx(12.0)
    assert work.forward_ms / work.backward_ms == pytest.approx(2 / 3)
    assert costs[0] == COSTS["bf16"]  # too little to be seen
    free = Network(4, math.inf, 0.0)
    alone = predict(work, free, Cost("none", "sum", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)).step_ms
    assert alone == pytest.approx(12.0)
    topk, vgc = (predict(work, free, cost).step_ms for cost in costs[1:])
    assert topk == pytest.approx(12 + 10)  # nothing is beside the backward
    assert vgc == pytest.approx(12 + 20)
    assert costs[2].moments == pytest.approx(1 + 4 * 2 / 10)
    assert (costs[2].bytes_per_element, costs[2].head_bytes) == (0.05, 40.0)


def test_a_disturbed_lap_changes_little():
    laps = {"bf16": 0.0, "topk": 1e6, "vgc": 0.0}
    work, costs = crowded(WORK, COSTS, 4, laps, plain_ms=1.0, meetings=NONE)
    assert work == WORK  # never less than what was measured
    assert costs[1].encode_ns == 8 * COSTS["topk"].encode_ns
    assert costs[2].encode_ns == 0.5 * COSTS["vgc"].encode_ns


def test_many_workers_are_measured_with_eight_messages():
    _, costs = crowded(WORK, COSTS, 100, {"bf16": 0.0, "topk": 7.0, "vgc": 0.0}, plain_ms=1.0, meetings=NONE)
    assert costs[1] == COSTS["topk"]  # 2 x 0.5 + 2 + 1 + 8 x 0.25 = 6 ms

"""A budget as a rate: by a clock that is set and by the real one, between two models, below the least, saved."""

from __future__ import annotations

import time
import warnings
from itertools import pairwise

import pytest
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from budgeted import counted, wide
from gradwire import VGC
from gradwire.errors import CheckpointError
from gradwire.exchange import budget
from gradwire.methods.rate import bytes_a_second

pytestmark = pytest.mark.alone


class Clock:
    """Of a step that takes as long as it is told: other programs on the machine do not count."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter_ns(self) -> int:
        return int(1e9 * self.now)


def by_clock(rate: str, periods: list[float]) -> tuple[list[float], list[int], list[str], int]:
    """When each step ended and what was sent by then; ranks measure by clocks of their own, 2 % apart."""
    clock, before = Clock(), budget.time
    budget.time = clock  # type: ignore[assignment]
    try:
        model = scenes.ddp(wide(), bucket_cap_mb=None)
        wire = gradwire.attach(model, VGC(alpha=0.0, budget=rate))
        optimizer, prints, n_bytes, at = scenes.sgd(model), [], [], []
        for step, period in enumerate(periods):
            clock.now += period * (1 + 0.02 * dist.get_rank())
            prints += scenes.train(model, range(step, step + 1), optimizer)
            n_bytes.append(wire.stats().bytes_sent)
            at.append(clock.now)
    finally:
        budget.time = before
    return at, n_bytes, prints, wire._reducer.budget.step_ns


@pytest.mark.parametrize(("workers", "rate"), [(2, "200kbit/s"), (3, "0.06MB/s")])
def test_a_rate_is_kept_after_fifty_steps(spawn, workers, rate):
    """Steps that vary by a tenth, an evaluation as long as a hundred of them, then steps of half the time."""
    periods = [0.1 * (1 + 0.1 * (-1) ** step) for step in range(80)] + [0.05] * 25
    periods[63] = 10.0
    results = spawn(workers, by_clock, rate, periods)
    (at, n_bytes, prints, step_ns), wanted = results[0], bytes_a_second(rate)
    for begin, end in ((50, 62), (64, 79), (92, 104)):
        found = (workers - 1) * (n_bytes[end] - n_bytes[begin]) / (at[end] - at[begin])
        assert 0.9 * wanted <= found <= 1.1 * wanted, (begin, found, wanted)
    assert n_bytes[2] < 3 * 800  # the least, until a step was measured
    for _, other_bytes, other_prints, other_ns in results:
        assert (other_bytes, other_prints, other_ns) == (n_bytes, prints, step_ns)


def paced(rate: str, n_steps: int, period: float) -> tuple[float, float, str]:
    """Mbit/s on a worker's way up after 50 steps, each of which takes `period` seconds if the machine is free."""
    model = scenes.ddp(wide(), bucket_cap_mb=None)
    wire = gradwire.attach(model, VGC(alpha=0.0, budget=rate))
    optimizer, n_bytes, at, due = scenes.sgd(model), [], [], time.perf_counter()
    for step in range(n_steps):
        due = max(due + period, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        list(scenes.train(model, range(step, step + 1), optimizer))
        n_bytes.append(wire.stats().bytes_sent)
        at.append(time.perf_counter())
    up = (dist.get_world_size() - 1) * (n_bytes[-1] - n_bytes[49])
    slowest = max(after - before for before, after in pairwise(at[30:]))
    return 8e-6 * up / (at[-1] - at[49]), slowest / period, scenes.digest(model.parameters())


def test_a_rate_is_kept_by_the_real_clock(spawn):
    results = spawn(2, paced, "200kbit/s", 80, 0.06)
    assert results[0][2] == results[1][2]
    if max(slowest for _, slowest, _ in results) > 1.5:
        pytest.skip("the machine is busy: steps that should take as long as each other do not")
    assert all(0.9 * 0.2 <= found <= 1.1 * 0.2 for found, _, _ in results), results


def two_models() -> tuple[list[str], list[int]]:
    """On one group and one courier, with backwards that overlap: figures and messages go in one order everywhere."""
    models = [scenes.ddp(wide(seed)) for seed in (0, 1)]
    wires = [gradwire.attach(model, VGC(alpha=0.0, budget="1Mbit/s")) for model in models]
    optimizers, prints = [scenes.sgd(model) for model in models], []
    for step in range(13):
        x, y = scenes.batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(nn.functional.cross_entropy(model(x), y) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
        prints.append(scenes.digest(p for model in models for p in model.parameters()))
    return prints, [wire._reducer.budget.step_ns for wire in wires]


@pytest.mark.parametrize("workers", [2, 3])
def test_two_models_on_one_group(spawn, workers):
    results = spawn(workers, two_models)
    assert all(one == results[0] for one in results)
    assert min(results[0][1]) > 0


def too_slow() -> tuple[list[str], list[int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n_bytes, _, _ = counted(VGC(budget="0.001kbit/s"), 12, {})
    texts = [str(one.message) for one in caught if "gradwire" in str(one.message)]
    return [text for text in texts if "momentum" not in text], n_bytes  # its SGD has one, of which rank 0 is told


def test_a_rate_below_the_least_is_said_once(spawn):
    for texts, n_bytes in spawn(2, too_slow):
        assert len(texts) == 1
        assert "this model needs" in texts[0]
        assert max(n_bytes) < 1000


def rated() -> tuple[int, int, list[int], str]:
    """Goes on with the time that was agreed on."""
    model = scenes.ddp(wide())
    wire = gradwire.attach(model, VGC(alpha=0.0, budget="1Mbit/s"))
    list(scenes.train(model, range(6), scenes.sgd(model)))
    state = wire.state_dict()
    other = gradwire.attach(scenes.ddp(wide()), VGC(alpha=0.0, budget="1Mbit/s"))
    other.load_state_dict(state)
    sent = [one._reducer.capacity.plan(VGC().words, one._reducer.budget.n_bytes).density for one in (wire, other)]
    bad = {**state, "step_ns": -1 if dist.get_rank() else state["step_ns"]}
    with pytest.raises(CheckpointError) as refusal:
        other.load_state_dict(bad)
    return state["step_ns"], other.state_dict()["step_ns"], sent, str(refusal.value)


def test_a_measured_time_is_saved(spawn):
    results = spawn(2, rated)
    for step_ns, loaded, densities, _ in results:
        assert step_ns == loaded == results[0][0] > 0
        assert densities[0] == densities[1]
    assert "step_ns is -1" in results[1][3]
    assert "another rank" in results[0][3]

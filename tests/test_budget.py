"""A byte budget: bytes of real processes, rates, resume, errors before anything is sent."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwire
import interpreted
import scenes
from gradwire import VGC, Dense, budget, from_spec
from gradwire.budget import bytes_a_second
from gradwire.capacity import DECADES, EACH, Capacity, above, density_at, most_buckets
from gradwire.compressors import to_spec
from gradwire.compressors.base import Context
from gradwire.errors import AttachError, CheckpointError
from gradwire.kernels import CHUNK, Rule, cpu, reference
from gradwire.layout import Layout
from gradwire.ranks import Ranks
from gradwire.train.settings import make_compressor
from test_checkpoint import interrupted, straight

BUDGET = VGC(alpha=0.5, max_bytes_per_step=1500)


@pytest.mark.parametrize(
    ("rate", "n_bytes"),
    [
        ("50Mbit/s", 6.25e6),
        ("50Mbit", 6.25e6),
        (" 50 mbit/s ", 6.25e6),
        ("6.25MB/s", 6.25e6),
        ("1Gbit/s", 1.25e8),
        (".8kbit/s", 100),
        ("3kB", 3000),
        ("1e3 kbit/s", 125_000),
    ],
)
def test_rates(rate, n_bytes):
    assert bytes_a_second(rate) == n_bytes
    compressor = from_spec(f"vgc:alpha=0.5,budget={rate}")
    assert compressor == VGC(alpha=0.5, budget=rate.strip())
    assert from_spec(to_spec(compressor)) == compressor


@pytest.mark.parametrize(
    "rate", ["", "fast", "50", "50Mb/s", "50mb", "50Mbit/h", "50 bit", "Mbit/s", "1e400GB", "1e9GB", "nanMB"]
)
def test_what_is_no_rate(rate):
    with pytest.raises(ValueError, match=r"VGC: budget: .*write 50Mbit/s, 1Gbit/s or 6.25MB/s"):
        VGC(budget=rate)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "0Mbit/s"}, "must be > 0"),
        ({"budget": "-5Mbit/s"}, "must be > 0"),
        ({"max_bytes_per_step": 0}, "whole number > 0, got 0"),
        ({"max_bytes_per_step": -7}, "whole number > 0"),
        ({"max_bytes_per_step": 1e4}, "whole number > 0, got 10000.0"),
        ({"max_bytes_per_step": True}, "whole number > 0"),
        (
            {"budget": "5Mbit", "max_bytes_per_step": 5},
            r"budget \(5Mbit\) and max_bytes_per_step \(5\) exclude each other",
        ),
        ({"budget": "5Mbit", "tau": 0.1}, r"tau \(0.1\) and budget \(5Mbit\) exclude"),
        ({"max_bytes_per_step": 5, "tau": 0.1}, "exclude each other"),
        ({"max_bytes_per_step": 5, "density": 0.1}, r"density \(0.1\) and max_bytes_per_step \(5\) exclude"),
        ({"budget": "5Mbit", "density": 0.1}, "exclude each other"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        VGC(**options)


def test_on_the_command_line():
    assert make_compressor("vgc:max_bytes_per_step=50000") == VGC(max_bytes_per_step=50_000)
    assert make_compressor("vgc:alpha=0,budget=50Mbit/s") == VGC(alpha=0.0, budget="50Mbit/s")
    with pytest.raises(Exception, match="--compressor vgc:budget=50: VGC: budget: '50' is not a rate"):
        make_compressor("vgc:budget=50")


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


def wide(seed: int = 0) -> nn.Sequential:
    """14 thousand parameters in ten tensors."""
    torch.manual_seed(seed)
    first = [nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 100), nn.LayerNorm(100), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 5))


def counted(compressor: Any, n_steps: int, options: dict[str, Any]) -> tuple[list[int], Any, list[str]]:
    """Bytes of every step, the totals, fingerprints; options: DDP's."""
    model = scenes.ddp(wide(), **options)
    wire = gradwire.attach(model, compressor)
    optimizer, n_bytes, prints = scenes.sgd(model), [0], []
    for step in range(n_steps):
        prints += scenes.train(model, range(step, step + 1), optimizer)
        n_bytes.append(wire.stats().bytes_sent)
    return [after - before for before, after in pairwise(n_bytes)], wire.stats(), prints


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
    return prints, n_bytes, float(sum(r.abs().sum() for r in wire._link.store.residuals()))


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


def refused() -> tuple[list[str], int, list[str], str]:
    model = scenes.ddp(wide())
    texts = []
    with pytest.raises(AttachError) as first:
        gradwire.attach(model, VGC(max_bytes_per_step=200))
    texts.append(str(first.value))
    wire = gradwire.attach(model, VGC(alpha=1.0))
    with pytest.raises(AttachError) as second:
        wire.compressor = VGC(max_bytes_per_step=200)
    texts.append(str(second.value))
    prints = list(scenes.train(model, range(3), scenes.sgd(model)))
    return texts, wire._link.capacity.least(VGC().words), prints, repr(wire.compressor)


def test_a_budget_that_no_step_can_keep_is_refused(spawn):
    results = spawn(2, refused)
    for texts, least, prints, compressor in results:
        wanted = f"max_bytes_per_step=200 is too little for this model: a step needs at least {least} bytes"
        assert all(text.startswith(wanted) for text in texts)
        assert 200 < least < 1000
        assert prints == results[0][2]
        assert compressor == repr(VGC(alpha=1.0))


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
def test_virtual_workers_have_the_bits_and_bytes_of_real_ones(spawn, messages):
    n_bytes, stats, prints = spawn(2, counted, BUDGET, 6, {"bucket_cap_mb": None})[0]
    torch.set_num_threads(1)
    ours, simulation = simulated(BUDGET, 2, 6, messages=messages)
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


def test_abreast_is_one_by_one_and_a_front_may_change_the_budget() -> None:
    layout = Layout.of([("a", (37, 29)), ("b", (5,)), ("empty", (0, 4)), ("c", (64, 33)), ("d", (1,))])
    both = [
        Ranks(replace(BUDGET, max_bytes_per_step=900), layout, 3, planned=True, abreast=kind) for kind in (True, False)
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
    return at, n_bytes, prints, wire._link.budget.step_ns


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
    return prints, [wire._link.budget.step_ns for wire in wires]


@pytest.mark.parametrize("workers", [2, 3])
def test_two_models_on_one_group(spawn, workers):
    results = spawn(workers, two_models)
    assert all(one == results[0] for one in results)
    assert min(results[0][1]) > 0


def too_slow() -> tuple[list[str], list[int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n_bytes, _, _ = counted(VGC(budget="0.001kbit/s"), 12, {})
    return [str(one.message) for one in caught if "gradwire" in str(one.message)], n_bytes


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
    sent = [one._link.capacity.plan(VGC().words, one._link.budget.n_bytes).density for one in (wire, other)]
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


def changing(encode: Any, **options: Any) -> None:
    """A kernel against the reference where every step has another density."""
    layout = Layout.of((f"t{i}", (size,)) for i, size in enumerate([33, 1, 0, 1500, 31]))
    states = [[torch.zeros(layout.numel) for _ in range(2)] for _ in range(2)]
    rooms, n_sent = tuple(slot.numel for slot in layout), []
    for step, density in enumerate((0.05, 0.2, 0.05, 0.011, 1.0, 1e-9)):
        rule = VGC(alpha=0.5, max_bytes_per_step=1000).rule_in(Context(layout, step, density=density))
        assert rule == Rule(0.5, 0.999, None, 0.0, False, "paper", density)
        generator = torch.Generator().manual_seed(step)
        samples = torch.randn(4, layout.numel, generator=generator)
        inputs = samples.sum(0), samples.square().sum(0)
        one = reference.encode(*inputs, *states[0], None, layout, rule, rooms, step, CHUNK)
        two = encode(*inputs, *states[1], None, layout, rule, rooms, step, CHUNK, **options)
        for name in ("words", "counts", "codes", "exponents", "passed", "finite"):
            assert torch.equal(getattr(one, name), getattr(two, name)), (step, name)
        assert all(map(torch.equal, *states)), step
        n_sent.append(int(one.counts.sum()))
    assert n_sent[4] > n_sent[1] > n_sent[0] > n_sent[3] > n_sent[5] > 0


def test_a_density_that_changes_on_the_cpu() -> None:
    changing(cpu.encode)


def interpreted_case(device: str) -> None:
    from gradwire.kernels import gpu

    changing(gpu.encode, shape=gpu.Shape(size=256, group=4, warps=4))


def test_a_density_that_changes_in_the_interpreter(interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, "changing")


if __name__ == "__main__":
    import interpreter

    interpreter.install()
    interpreted.serve({"changing": interpreted_case})

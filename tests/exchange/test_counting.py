"""What is reported is what was handed to the collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import BF16, VGC, Dense
from gradwire.exchange import courier as exchange
from gradwire.exchange.room import REST, Capacity, padded
from gradwire.layout import Layout
from gradwire.methods import Context


def spied(compressor, n_steps):
    """Counts the bytes of every collective on its way through, and the decoded elements."""
    real_gather, real_reduce, handed = exchange.begin_gather, dist.all_reduce, []

    def gather(out, tensor, *args, **kwargs):
        handed.append(tensor.numel() * tensor.element_size())
        return real_gather(out, tensor, *args, **kwargs)

    def reduce(tensor, *args, **kwargs):
        handed.append(tensor.numel() * tensor.element_size())
        return real_reduce(tensor, *args, **kwargs)

    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, compressor)
    exchange.begin_gather, dist.all_reduce = gather, reduce
    try:
        list(scenes.train(model, range(n_steps), scenes.sgd(model)))
    finally:
        exchange.begin_gather, dist.all_reduce = real_gather, real_reduce
    return wire.stats(), sum(handed), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("compressor", [VGC(alpha=1.5), VGC(alpha=1.0, tau=0.01), Dense(), BF16()], ids=repr)
def test_bytes_reported_are_bytes_handed_to_the_collective(spawn, workers, compressor):
    for stats, handed, n_parameters in spawn(workers, spied, compressor, 10):
        assert stats.bytes_sent == handed > 0
        assert stats.dense_bytes == 10 * 4 * n_parameters
        assert stats.bits_per_parameter == pytest.approx(8 * handed / 10 / n_parameters)
        assert stats.ratio == pytest.approx(n_parameters * 10 / sum(stats.elements_sent.values()))
        assert stats.exchange_ms > 0
        if isinstance(compressor, VGC):
            assert stats.encode_ms > 0
            assert stats.decode_ms > 0
            assert stats.residual_norm > 0
            assert stats.delay > 0
        else:
            assert stats.ratio == 1
            assert stats.delay == 0
        if isinstance(compressor, BF16):
            assert stats.bytes_sent == stats.dense_bytes // 2


def delay_by_hand():
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.5))
    optimizer = scenes.sgd(model)
    list(scenes.train(model, range(6), optimizer))
    wire.reset_stats()
    x, y = scenes.batch(6)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    sent = sum(float(p.grad.abs().sum()) for p in model.parameters())
    held = sum(float(r.abs().sum()) for r in scenes.state_of(wire, "residual").values())
    return wire.stats(), held / sent, sum(int((p.grad != 0).sum()) for p in model.parameters())


def test_delay_and_elements_of_one_worker(spawn):
    """Alone, what a worker decodes is what it sent."""
    stats, delay, n_sent = spawn(1, delay_by_hand)[0]
    assert stats.steps == 1
    assert stats.delay == pytest.approx(delay, rel=1e-4)
    assert sum(stats.elements_sent.values()) == n_sent
    assert "bits/parameter" in str(stats)


def logged(directory):
    from torch.utils.tensorboard import SummaryWriter

    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.5))
    with SummaryWriter(directory) as writer:
        wire.log_to(writer, every=3)
        list(scenes.train(model, range(10), scenes.sgd(model)))


def test_figures_reach_tensorboard(spawn, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spawn(1, logged, str(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    rows = events.Scalars("gradwire/bytes_sent")
    assert [row.step for row in rows] == [3, 6, 9]
    assert rows[0].value < rows[1].value < rows[2].value
    assert {"gradwire/ratio", "gradwire/delay", "gradwire/encode_ms"} <= set(events.Tags()["scalars"])


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 600), nn.Tanh(), nn.Linear(600, 300), nn.Tanh(), nn.Linear(300, 5))


def padding(n_steps):
    """Words sent and words in use by the fullest rank, over 20 steps after `n_steps`."""
    model = scenes.ddp(wide(), bucket_cap_mb=1)
    wire = gradwire.attach(model, VGC(alpha=2.0, wire="words"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    used, before = 0, 0
    for step in range(n_steps + 20):
        if step == n_steps:
            wire.reset_stats()
        x, y = scenes.batch(step, size=64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y.roll(1)).backward()  # labels of other samples: noise that stays noise
        optimizer.step()
        sent = sum(wire.stats().elements_sent.values())
        fullest = torch.tensor(float(sent - (before if step > n_steps else 0)))
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        used, before = used + int(fullest) * (step >= n_steps), sent
    return wire.stats(), used


@pytest.mark.parametrize("workers", [2, 3])
def test_padding_is_counted_and_small_in_steady_state(spawn, workers):
    """Ranks of a small model differ by a factor of two in what passes; the capacity follows the fullest."""
    for stats, used in spawn(workers, padding, 25):
        assert stats.dense_steps == 0
        assert 0.75 <= 4 * used / stats.bytes_sent < 1.0
        assert stats.bytes_received == stats.bytes_sent * (workers - 1)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_padding_of_a_compact_message_is_small(density):
    """Room for one step's count, made from that of the step before; the words after the last one in use are padding."""
    layout = Layout.of([("a", (1_000_000,)), ("b", (500,))])
    torch.manual_seed(0)
    grad = torch.randn(layout.numel)
    moment = torch.where(torch.rand(layout.numel) < density, 0.0, 1e9)
    vgc, counts = VGC(alpha=1.0), [int(1_000_000 * density), int(500 * density)]
    capacity = tuple(min(padded(count), slot.numel) for count, slot in zip(counts, layout, strict=True))
    state = vgc.init(layout, torch.device("cpu"))
    message = vgc.encode(grad, moment, state, Context(layout, 0, capacity))
    used = int(message.data.nonzero().max()) + 1
    assert 0.75 * len(message.data) <= used < len(message.data)
    assert len(message.data) < 0.7 * sum(capacity)  # the paper's words


def numels(layout):
    return {slot.name: slot.numel for slot in layout}


def as_words(numel, room):
    return room


def test_a_step_never_costs_more_than_the_dense_one():
    layout = Layout.of([("a", (10_000,)), ("b", (3_000,))])
    for world_size in (1, 2, 8, 64):
        capacity = Capacity(4 * layout.numel, world_size, numels(layout))
        assert capacity.plan(as_words).dense  # nothing is known yet
        capacity.note(layout, [5_000, 2_900])
        capacity.end_step(capacity.plan(as_words))
        for _ in range(3 * REST):
            plan = capacity.plan(as_words)
            words = sum(capacity.of(layout, plan)) + 20
            assert plan.dense or words * world_size <= 2 * layout.numel
            capacity.note(layout, [5_000, 2_900])
            capacity.end_step(plan)
        if world_size > 8:
            assert capacity.since_dense > 0  # it does not stay dense for ever: see REST


def test_capacity_follows_what_passed_and_keeps_absent_tensors():
    layout = Layout.of([("a", (10_000,)), ("b", (3_000,))])
    capacity = Capacity(4 * layout.numel, 2, numels(layout))
    capacity.note(layout, [400, 100])
    capacity.end_step(capacity.plan(as_words))
    plan = capacity.plan(as_words)
    rooms = capacity.of(layout, plan)
    assert all(count < room < count / 0.7 for count, room in zip([400, 100], rooms, strict=True))
    capacity.note(layout, [400, -1])
    assert capacity.passed == {"a": 400, "b": 100}

"""The adapter with real processes: replicas, plain DDP bit for bit, buckets and their rebuild, DDP's options."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import BF16, VGC, Dense

WORKERS = [1, 2, 3]
FEEDBACK = VGC(alpha=1.0, feedback=True)


def same(prints: list[list[str]]) -> list[str]:
    """All ranks have the same parameters after every step; what they are."""
    assert all(other == prints[0] for other in prints)
    assert len(set(prints[0])) == len(prints[0])  # and they move
    return prints[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_dense_is_plain_ddp_bit_for_bit(spawn, workers):
    assert same(spawn(workers, scenes.run, Dense())) == same(spawn(workers, scenes.run, None))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), VGC(alpha=1.0, tau=0.01), FEEDBACK, BF16()], ids=repr)
def test_replicas_are_bitwise_equal_after_every_step(spawn, workers, compressor):
    prints = same(spawn(workers, scenes.run, compressor))
    assert prints != same(spawn(workers, scenes.run, None))  # it does something


@pytest.mark.slow
def test_replicas_are_equal_under_load(spawn):
    """Busy cores change who comes first, never what comes out."""
    quiet = same(spawn(3, scenes.run, VGC(alpha=1.0), 20))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert same(spawn(3, scenes.run, VGC(alpha=1.0), 20)) == quiet
    finally:
        for burner in burners:
            burner.kill()


def count_buckets(options):
    model = scenes.ddp(scenes.net(), **options)
    seen = []
    wire = gradwire.attach(model, VGC(alpha=1.0))
    exchange = wire._reducer.exchange
    wire._reducer.exchange = lambda bucket: (seen.append(bucket.is_last()), exchange(bucket))[1]
    list(scenes.train(model, range(4), scenes.sgd(model)))
    ends = [i for i, last in enumerate(seen) if last]
    return [end - begin for begin, end in zip([-1, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("workers", WORKERS)
def test_buckets_do_not_change_the_result(spawn, workers):
    """Eight and more buckets, one bucket, rebuilt or never rebuilt: the same bits."""
    many, one = {}, {"bucket_cap_mb": 100}
    assert spawn(workers, count_buckets, many)[0] == [1, 10, 10, 10]  # rebuilt after the first step
    assert max(spawn(workers, count_buckets, one)[0]) == 1
    variants = [many, one, {"bucket_cap_mb": 0.003}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
    if workers < 3:  # never rebuilt; its first, dense step is a ring's sum, whose order follows the buckets
        variants.append({"find_unused_parameters": True})
    expected = None
    for options in variants:
        results = spawn(workers, prints_and_deferred, options)
        prints = same([prints for prints, _ in results])
        assert prints == (expected := expected or prints), options
        assert results[0][1] > 0  # although the capacity does bind: room is given by tensor


def prints_and_deferred(options):
    model = scenes.ddp(scenes.net(), **options)
    wire = gradwire.attach(model, VGC(alpha=1.0))
    return list(scenes.train(model, range(12), scenes.sgd(model))), wire.stats().deferred


def conservation(compressor, n_steps):
    """lr = 0: the parameters stand still, so every step's gradient can be added up beside the wire."""
    model, plain = scenes.ddp(scenes.net()), scenes.net()
    wire = gradwire.attach(model, compressor)
    optimizer = scenes.sgd(model, lr=0.0)
    arrived = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    computed = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    for step in range(n_steps):
        x, y = scenes.batch(step)
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for total, p in zip(arrived, model.parameters(), strict=True):
            total += p.grad
        for total, p in zip(computed, plain.parameters(), strict=True):
            total += p.grad
    names = [name for name, _ in plain.named_parameters()]
    held = [scenes.state_of(wire, "residual")[name].double() for name in names]
    sent = wire.stats().elements_sent
    errors = []
    for there, here, left in zip(arrived, computed, held, strict=True):
        for tensor in (here, left):
            dist.all_reduce(tensor.div_(dist.get_world_size()))
        errors.append(float((there + left - here).abs().max()))
    return max(errors), sum(sent.values()), float(sum(t.abs().sum() for t in held))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("compressor", [FEEDBACK, VGC(alpha=2.0, tau=0.01), VGC(alpha=0, floor=0.01, feedback=True)])
def test_nothing_is_lost_over_real_processes(spawn, workers, compressor):
    """What arrived + what is held back = what was computed, in the mean over the workers."""
    for error, n_sent, held in spawn(workers, conservation, compressor, 15):
        assert error < 2e-6  # float32 sums of 15 gradients of order 0.1
        assert n_sent > 0
        assert held > 0.01


def moments_in_place():
    """After the first compressed step v of an unsent element is zeta times its second moment of that step alone."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0), strict=True)
    optimizer = scenes.sgd(model, lr=0.0)
    for step in range(2):  # the first one is dense and leaves r = v = 0
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    reference = scenes.net()
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in reference.named_parameters()}
    for i in range(len(x)):
        reference.zero_grad()
        (nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()
        for name, p in reference.named_parameters():
            expected[name] += p.grad.double() ** 2
    worst, unsent = 0.0, 0
    for name, v in scenes.state_of(wire, "variance").items():
        kept = v > 0
        unsent += int(kept.sum())
        truth = 0.999 * expected[name][kept]
        worst = max(worst, float(((v[kept].double() - truth).abs() / truth).max())) if kept.any() else worst
    return worst, unsent


def test_every_moment_is_there_before_its_bucket_leaves(spawn):
    for worst, unsent in spawn(2, moments_in_place):
        assert worst < 1e-4  # squares of float32 gradients
        assert unsent > 500


def accumulate(compressor, parts, find_unused):
    """A step of `parts` micro-batches under no_sync; the whole batch is always the same."""
    model = scenes.ddp(scenes.net(), find_unused_parameters=find_unused)
    wire = gradwire.attach(model, compressor)
    optimizer = scenes.sgd(model, lr=0.0)
    for step in range(3):
        x, y = scenes.batch(step, size=12)
        optimizer.zero_grad()
        for number, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            # the forward of an accumulation step belongs inside no_sync too
            with model.no_sync() if number < parts - 1 else contextlib.nullcontext():
                (nn.functional.cross_entropy(model(xs), ys) / parts).backward()
        optimizer.step()
    return wire.state_dict()["parameters"], wire.steps


@pytest.mark.parametrize("find_unused", [False, True])
def test_no_sync_accumulation_is_one_step_of_the_whole_batch(spawn, find_unused):
    """A floor nobody reaches keeps all of r and v here after the first, dense step."""
    still = VGC(alpha=1e-3, floor=1e6)
    for (whole, steps), (parts, part_steps) in zip(
        spawn(2, accumulate, still, 1, find_unused), spawn(2, accumulate, still, 3, find_unused), strict=True
    ):
        assert steps == part_steps == 3
        for name in whole:
            for field in ("residual", "variance"):
                assert whole[name][field].abs().max() > 0
                torch.testing.assert_close(parts[name][field], whole[name][field], rtol=1e-4, atol=1e-7)


class Branches(nn.Module):
    """One branch a step: the other one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.never = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x, branch):
        return (self.first, self.second)[branch](x)


def unused():
    model = scenes.ddp(Branches(), find_unused_parameters=True)
    wire = gradwire.attach(model, VGC(alpha=1.5))
    optimizer = scenes.sgd(model)
    history = []
    for step in range(8):
        x, y = scenes.batch(step)
        branch = (step + dist.get_rank()) % 2 if step >= 6 else step % 2  # at last each rank its own
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, branch), y).backward()
        optimizer.step()
        history.append({name: fields["variance"].clone() for name, fields in wire.state_dict()["parameters"].items()})
    return history, scenes.digest(model.parameters()), dist.get_rank()


def test_a_parameter_without_a_gradient_is_left_alone(spawn):
    results = spawn(2, unused)
    assert results[0][1] == results[1][1]
    for history, _, rank in results:
        for step in range(1, 8):
            branch = (step + rank) % 2 if step >= 6 else step % 2
            idle, busy = ("first", "second")[::-1][branch] + ".weight", ("first", "second")[branch] + ".weight"
            assert torch.equal(history[step][idle], history[step - 1][idle])
            assert not torch.equal(history[step][busy], history[step - 1][busy])
        assert history[-1]["never.weight"].eq(0).all()


def two_optimizers_and_clipping():
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))
    layers = list(model.module)
    first = torch.optim.SGD(nn.Sequential(*layers[:3]).parameters(), lr=0.1)
    second = torch.optim.Adam(nn.Sequential(*layers[3:]).parameters(), lr=1e-2)
    norms = []
    for step in range(6):
        x, y = scenes.batch(step)
        first.zero_grad()
        second.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
        first.step()
        second.step()
    return max(norms), scenes.digest(model.parameters())


def test_two_optimizers_and_clipping_after_the_exchange(spawn):
    (norm, prints), (_, others) = spawn(2, two_optimizers_and_clipping)
    assert norm <= 0.1 + 1e-6
    assert prints == others


def first_steps_then_compressed():
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.5))
    list(scenes.train(model, range(30), scenes.sgd(model, lr=0.01)))
    return wire.stats()


def test_the_first_step_is_dense_and_the_rest_is_not(spawn):
    for stats in spawn(2, first_steps_then_compressed):
        assert 1 <= stats.dense_steps < 6
        assert stats.steps == 30
        assert stats.ratio > 3


def spoiled_step():
    """One inf on one rank at step 1, no scaler: NaN everywhere as in plain DDP; the loop leaves that step out."""
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))
    optimizer, nan = torch.optim.SGD(model.parameters(), lr=0.05), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            x, y = scenes.batch(step)
            if dist.get_rank() == 1 and step in (1, 2):
                x[0, 0] = float("inf")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nan.append([bool(p.grad.isnan().all()) for p in model.parameters()])
            if not any(nan[-1]):
                optimizer.step()
        return nan, [str(w.message) for w in caught if "gradwire" in str(w.message)]


def test_without_a_scaler_everything_is_nan_and_one_warning_says_so(spawn):
    for nan, messages in spawn(2, spoiled_step):
        assert [all(step) for step in nan] == [any(step) for step in nan] == [False, True, True, False]
        assert len(messages) == 1
        assert "scaler=scaler" in messages[0]

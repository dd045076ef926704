"""GradScaler with the methods whose rounds are sums: units of 1, one inf, a step left out, a dense step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import Dense, PowerSGD, RandomK

SPOILED = 4
METHODS = [PowerSGD(rank=2, min_compression=1.0), RandomK(density=0.2)]


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_a_changing_scale_changes_no_bit(spawn, compressor):
    steady = spawn(2, scenes.scaled_run, compressor, [1.0], 8)
    changing = spawn(2, scenes.scaled_run, compressor, [1024.0, 65536.0, 2.0, 0.5], 8)
    assert steady[0][0] == steady[1][0] == changing[0][0] == changing[1][0]
    for (_, held), (_, other) in zip(steady, changing, strict=True):
        torch.testing.assert_close(held, other, rtol=0, atol=0)
    assert not torch.equal(*(held["0.weight"]["residual"] for _, held in steady))


def around_a_lost_step(compressor, cause):
    """A step that the scaler leaves out: an inf here, on rank 1, or in another model; or an inf in a dense step.

    Returns the states before and after it, this rank's gradient, and what the parameters were at the end of each step.
    """
    model, other = scenes.ddp(scenes.net()), nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wire = gradwire.attach(model, compressor, scaler=scaler)
    optimizers = [scenes.sgd(model, lr=0.05), torch.optim.SGD(other.parameters(), lr=0.1)]
    prints, states, given = [], [], {}
    for step in range(8):
        x, y = scenes.batch(step)
        if step == SPOILED:
            local = scenes.net()
            local.load_state_dict(model.module.state_dict())
            nn.functional.cross_entropy(local(x), y).backward()
            given = {name: p.grad for name, p in local.named_parameters()}
            if cause == "dense step":
                wire.compressor = Dense()
        for optimizer in optimizers:
            optimizer.zero_grad()
        handles = []
        if step == SPOILED and cause != "another model" and dist.get_rank() == 1:
            handles = [model.module[2].bias.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), float("inf")))]
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        for handle in handles:
            handle.remove()
        bad = float("inf") if step == SPOILED and cause == "another model" else 1.0
        scaler.scale(other(torch.ones(1, 2)).sum() * bad).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        found = [scaler._found_inf_per_device(optimizer) for optimizer in optimizers]
        if not any(bool(value) for each in found for value in each.values()):
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        prints.append(scenes.digest(model.parameters()))
        states.append(wire.state_dict()["parameters"])
        if step == SPOILED and cause == "dense step":
            wire.compressor = compressor
    return prints, states, given


@pytest.mark.parametrize("cause", ["inf", "dense step"])
@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_a_lost_step_loses_nothing_that_is_finite(spawn, compressor, cause):
    results = spawn(2, around_a_lost_step, compressor, cause)
    assert results[0][0] == results[1][0]
    for rank, (prints, states, given) in enumerate(results):
        assert prints[SPOILED] == prints[SPOILED - 1]
        assert len(set(prints)) == 7
        before, after = states[SPOILED - 1], states[SPOILED]
        for name, gradient in given.items():
            expected = before[name]["residual"] + gradient
            if rank == 1 and name == "2.bias":
                expected[1] = before[name]["residual"][1]
            torch.testing.assert_close(after[name]["residual"], expected, rtol=1e-5, atol=1e-7)
            if "basis" in before[name]:
                assert torch.equal(after[name]["basis"], before[name]["basis"])


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_a_step_left_out_because_of_another_model_is_taken_back(spawn, compressor):
    """At the next backward: what that one sends has the lost step's gradient in it, on every rank alike."""
    results = spawn(2, around_a_lost_step, compressor, "another model")
    assert results[0][0] == results[1][0]
    for prints, states, _ in results:
        assert prints[SPOILED] == prints[SPOILED - 1]
        assert len(set(prints)) == 7
        assert all(bool(v.isfinite().all()) for fields in states[-1].values() for v in fields.values())


def taken_back(compressor, lost):
    """lr = 0, all that is held back comes out in the end: what arrived in steps that counted, less all gradients."""
    model, plain = scenes.ddp(scenes.net()), scenes.net()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    wire = gradwire.attach(model, compressor, scaler=scaler)
    optimizer = scenes.sgd(model, lr=0.0)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    for step in range(6):
        if step == 5:
            wire.compressor = Dense()
        x, y = scenes.batch(step)
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        for value, p, q in zip(total, model.parameters(), plain.parameters(), strict=True):
            mean = q.grad / dist.get_world_size()
            dist.all_reduce(mean)
            value += (0 if step == lost else p.grad.double()) - mean
        if step == lost:  # what a scaler does when another of its optimizers has an inf
            scaler.update(scaler.get_scale() / 2)
        else:
            scaler.step(optimizer)
            scaler.update()
    return max(float(value.abs().max()) for value in total), scenes.held(wire)


@pytest.mark.parametrize("lost", [None, 1, 3])
@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_all_that_was_computed_arrives(spawn, compressor, lost):
    for error, left in spawn(2, taken_back, compressor, lost):
        assert left == 0
        assert error < 1e-6

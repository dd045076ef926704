"""Steps that go wrong, are left out or are unlike others: nothing is lost, nobody is stuck."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC, Dense

OPTIMIZERS = {
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def with_optimizer(name):
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))
    return list(scenes.train(model, range(4), OPTIMIZERS[name](model.parameters())))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_counts_as_a_step(spawn, name):
    """Fused kernels write the parameters without moving their versions."""
    prints = spawn(2, with_optimizer, name)
    assert prints[0] == prints[1]
    assert len(set(prints[0])) == 4


def one_scaler_two_models():
    """An inf in the second model: the scaler leaves out the one optimizer of both."""
    models = [scenes.ddp(scenes.net(seed)) for seed in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wires = [gradwire.attach(model, VGC(alpha=1.0), scaler=scaler) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    prints, history = [], []
    for step in range(5):
        x, y = scenes.batch(step)
        spoiled = x.clone()
        if step in (0, 3) and dist.get_rank() == 1:
            spoiled[0, 0] = float("inf")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(models[0](x), y) + nn.functional.cross_entropy(models[1](spoiled), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        prints.append(scenes.digest(models[0].parameters()))
        history.append(scenes.held(wires[0]))
    return prints, history, [wire.steps for wire in wires]


def test_a_step_left_out_because_of_another_model_is_taken_back(spawn):
    results = spawn(2, one_scaler_two_models)
    for prints, _, steps in results:
        assert prints == results[0][0]
        assert prints[3] == prints[2] != prints[1]  # left out, and it goes on after it
        assert prints[4] != prints[3]
        assert steps == [5, 5]


def mixed_static(compressor):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    net[2].to(torch.bfloat16)
    net[1].register_forward_hook(lambda module, inputs, output: output.bfloat16())
    model = DistributedDataParallel(net, static_graph=True)
    wire = gradwire.attach(model, compressor)
    prints = []
    optimizer = scenes.sgd(model)
    for step in range(5):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        prints.append(scenes.digest(p.float() for p in model.parameters()))
    return prints, wire.stats().steps


@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), Dense()], ids=["vgc", "dense"])
def test_a_static_graph_of_two_dtypes(spawn, compressor):
    """In its first step DDP calls no bucket the last one."""
    results = spawn(2, mixed_static, compressor)
    assert results[0] == results[1]
    assert results[0][1] == 5


class Broken:
    def add_scalar(self, *args):
        raise OSError("disk full")


def logging_fails():
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    if dist.get_rank() == 0:
        wire.log_to(Broken(), every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prints = list(scenes.train(model, range(5), scenes.sgd(model)))
    return prints, [str(w.message) for w in caught if "logged" in str(w.message)]


def test_a_log_that_fails_does_not_stop_the_training(spawn):
    results = spawn(2, logging_fails)
    assert results[0][0] == results[1][0]
    assert "disk full" in results[0][1][0]


def bad_start():
    """A fresh GradScaler often spoils the first step: the next one is then the first, and dense."""
    model = scenes.ddp(scenes.net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    wire = gradwire.attach(model, VGC(alpha=1.0), scaler=scaler)
    optimizer = scenes.sgd(model)
    for step in range(2):
        x, y = scenes.batch(step)
        if step == 0:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return wire.stats().dense_steps, wire.stats().deferred


def test_a_bad_step_teaches_the_capacity_nothing(spawn):
    assert spawn(2, bad_start) == [(2, 0), (2, 0)]


def tiny():
    torch.manual_seed(0)
    model = scenes.ddp(nn.Sequential(nn.Linear(12, 1), nn.Linear(1, 5)))
    wire = gradwire.attach(model, VGC(alpha=1.0))
    list(scenes.train(model, range(6), scenes.sgd(model)))
    return wire.stats().dense_steps, wire.stats().ratio


def test_a_model_too_small_for_messages_sends_everything(spawn):
    assert spawn(3, tiny) == [(6, 1.0)] * 3


def recurrent(stop, n_steps):
    """`signs` draws random signs: they are those of the step, so a resumed run draws the same."""

    def build():
        torch.manual_seed(0)
        net = nn.LSTM(12, 5, batch_first=True)
        model = scenes.ddp(net)
        return model, gradwire.attach(model, VGC(alpha=1.0), estimator="signs"), scenes.sgd(model)

    model, wire, optimizer = build()
    for step in range(n_steps):
        if step == stop:
            saved = wire.state_dict(), model.module.state_dict(), optimizer.state_dict()
            model, wire, optimizer = build()
            model.module.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
            wire.load_state_dict(saved[0])
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:, None])[0][:, 0], y).backward()
        optimizer.step()
    return scenes.digest(model.parameters())


def test_random_signs_resume_bit_for_bit(spawn):
    assert spawn(2, recurrent, 4, 8) == spawn(2, recurrent, None, 8)

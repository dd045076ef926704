"""Steps that go wrong or are left out, compressors that change at awkward moments: nothing is lost, nobody is stuck."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import BF16, VGC, Dense

STRICT = VGC(alpha=4.0, feedback=True)


def held(wire):
    return float(sum(r.abs().sum() for r in scenes.state_of(wire, "residual").values()))


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
        history.append(held(wires[0]))
    return prints, history, [wire.steps for wire in wires]


def test_a_step_left_out_because_of_another_model_is_taken_back(spawn):
    results = spawn(2, one_scaler_two_models)
    for prints, _, steps in results:
        assert prints == results[0][0]
        assert prints[3] == prints[2] != prints[1]  # left out, and it goes on after it
        assert prints[4] != prints[3]
        assert steps == [5, 5]


def balance(sequence, spoil=(), unused=(), keep_zero=False):
    """What arrived minus what was computed, with lr = 0; `spoil`: steps with an inf, taken back by a scaler."""
    model, plain = scenes.ddp(Two(), find_unused_parameters=True), Two()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wire = gradwire.attach(model, sequence[0], scaler=scaler)
    optimizer = scenes.sgd(model, lr=0.0)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in plain.named_parameters()}
    for step, compressor in enumerate(sequence):
        if step:
            wire.compressor = compressor
        x, y = scenes.batch(step)
        plain.zero_grad()
        (nn.functional.cross_entropy(plain(x, step in unused), y)).backward()
        optimizer.zero_grad(set_to_none=not keep_zero)
        inputs = x.clone()
        if step in spoil and dist.get_rank() == 1:
            inputs[0, 0] = float("inf")
        scaler.scale(nn.functional.cross_entropy(model(inputs, step in unused), y)).backward()
        scaler.unscale_(optimizer)
        good = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            mean = torch.zeros_like(q) if q.grad is None else q.grad / dist.get_world_size()
            dist.all_reduce(mean)
            if good:
                total[name] += (0 if p.grad is None else p.grad.double()) - mean
        scaler.step(optimizer)
        scaler.update()
    return max(float(value.abs().max()) for value in total.values()), held(wire)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x, only_first=False):
        return self.first(x) if only_first else self.first(x) + self.second(x)


@pytest.mark.parametrize("last", [Dense(), BF16()], ids=repr)
def test_a_switch_to_a_sum_takes_everything_along(spawn, last):
    for error, left in spawn(2, balance, [STRICT, STRICT, STRICT, last, last]):
        assert error < (1e-6 if last == Dense() else 1e-2)
        assert left == 0


def test_a_switch_whose_first_step_is_spoiled_loses_nothing(spawn):
    """The spoiled gradient of step 3 itself stays held back by nobody: a scaler drops that step in plain DDP too."""
    for error, left in spawn(2, balance, [STRICT, STRICT, STRICT, Dense(), Dense()], (3,)):
        assert left == 0
        assert error < 0.6  # only that step's own gradient may have come in addition


@pytest.mark.parametrize("keep_zero", [False, True])
def test_a_switch_with_an_unused_layer_keeps_what_it_holds(spawn, keep_zero):
    sequence = [STRICT, STRICT, STRICT, Dense(), Dense()]
    for error, left in spawn(2, balance, sequence, (), (3, 4), keep_zero):
        assert left > 0  # the second layer's share is still there
        assert error > 1e-4


def attached_again():
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, STRICT)
    optimizer = scenes.sgd(model)
    list(scenes.train(model, range(4), optimizer))
    before = held(wire)
    wire.detach()
    again = gradwire.attach(model, VGC(alpha=2.0))
    after = held(again)
    list(scenes.train(model, range(4, 6), optimizer))
    again.detach()
    sums = gradwire.attach(model, Dense())
    kept = held(sums)
    prints = list(scenes.train(model, range(6, 8), optimizer))
    return before, after, kept, held(sums), prints


def test_detach_and_attach_without_a_step_between_loses_nothing(spawn):
    results = spawn(2, attached_again)
    for before, after, kept, left, prints in results:
        assert before == after > 0
        assert kept > 0
        assert left == 0
        assert prints == results[0][4]


def refused_attach(case):
    model = scenes.ddp(nn.LSTM(12, 5, batch_first=True) if case == "strict" else scenes.net())
    optimizer = scenes.sgd(model)
    wire = None
    try:
        if case == "strict":
            gradwire.attach(model, VGC(), strict=True)
        elif case == "disagree":
            gradwire.attach(model, VGC(alpha=1.0 + dist.get_rank()))
        else:
            wire = gradwire.attach(model, Dense())
            wire.compressor = {"class": VGC, "string": "vgc"}[case]
    except Exception as error:
        message = str(error)
    prints = []
    for step in range(3):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        output = model(x[:, None])[0][:, 0] if case == "strict" else model(x)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
        prints.append(scenes.digest(model.parameters()))
    again = wire or gradwire.attach(model, VGC())
    return message, prints, repr(again.compressor)


@pytest.mark.parametrize("case", ["strict", "disagree", "class", "string"])
def test_a_refused_attach_leaves_plain_ddp(spawn, case):
    results = spawn(2, refused_attach, case)
    for message, prints, compressor in results:
        assert message
        assert prints == results[0][1]
        assert len(set(prints)) == 3
        assert compressor == repr(Dense() if case in ("class", "string") else VGC())


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


def frozen_late():
    net = scenes.net()
    model = scenes.ddp(net)
    net[0].requires_grad_(False)
    try:
        gradwire.attach(model, VGC())
    except gradwire.errors.AttachError as error:
        return str(error)
    return "no error"


def test_freezing_between_ddp_and_attach_is_refused(spawn):
    assert "freeze or unfreeze first" in spawn(1, frozen_late)[0]


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

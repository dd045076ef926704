"""Compressors that change at awkward moments, attaching that is refused or done again: nothing is lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import BF16, VGC, Dense

STRICT = VGC(alpha=4.0, feedback=True)


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
    return max(float(value.abs().max()) for value in total.values()), scenes.held(wire)


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


def test_a_switch_to_a_method_without_moments_and_back_loses_nothing(spawn):
    plain = VGC(alpha=0, floor=0.05, feedback=True)
    for error, left in spawn(2, balance, [STRICT, STRICT, plain, plain, STRICT, Dense(), Dense()]):
        assert error < 1e-6
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
    before = scenes.held(wire)
    wire.detach()
    again = gradwire.attach(model, VGC(alpha=2.0))
    after = scenes.held(again)
    list(scenes.train(model, range(4, 6), optimizer))
    again.detach()
    sums = gradwire.attach(model, Dense())
    kept = scenes.held(sums)
    prints = list(scenes.train(model, range(6, 8), optimizer))
    return before, after, kept, scenes.held(sums), prints


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
            wire.compressor = {"class": VGC, "string": "vcg"}[case]
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

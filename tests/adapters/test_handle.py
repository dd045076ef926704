"""The handle of an attached model: copies, a changed compressor, detach, and being dropped; with real processes."""

from __future__ import annotations

import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import BF16, VGC, Dense
from gradwire.errors import GradwireError


def averaged():
    """An EMA copy made by deepcopy computes with its own weights and changes nothing of the original's run."""
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))
    ema = copy.deepcopy(model.module)
    optimizer = scenes.sgd(model)
    x = torch.randn(4, 12)
    before = ema(x)
    for step in range(4):
        list(scenes.train(model, range(step, step + 1), optimizer))
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.5)
    plain = scenes.net()
    plain.load_state_dict(ema.state_dict())
    whole = copy.deepcopy(model)  # DDP itself, as torch.optim.swa_utils.AveragedModel does
    return torch.equal(ema(x), plain(x)), torch.equal(before, ema(x)), scenes.digest(model.parameters()), type(whole)


def test_deepcopy_of_the_model(spawn):
    for equal, unchanged, prints, kind in spawn(2, averaged):
        assert equal
        assert not unchanged
        assert prints == spawn(2, scenes.run, VGC(alpha=1.0), 4)[0][-1]
        assert kind is DistributedDataParallel


def switching(sequence):
    """Changes the compressor between steps; everything computed must have arrived when Dense comes last."""
    model, plain = scenes.ddp(scenes.net()), scenes.net()
    wire = gradwire.attach(model, sequence[0])
    optimizer = scenes.sgd(model, lr=0.0)
    balance = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    for step, compressor in enumerate(sequence):
        if step:
            wire.compressor = compressor
        x, y = scenes.batch(step)
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for total, p, q in zip(balance, model.parameters(), plain.parameters(), strict=True):
            mean = q.grad.double() / dist.get_world_size()
            dist.all_reduce(mean)
            total += p.grad - mean
    return max(float(total.abs().max()) for total in balance), repr(wire.compressor)


@pytest.mark.parametrize("workers", [1, 2])
def test_changing_the_compressor_carries_what_is_held_back(spawn, workers):
    strict, hybrid = VGC(alpha=4.0, feedback=True), VGC(alpha=2.0, tau=0.1)
    sequence = [strict, strict, strict, hybrid, hybrid, Dense(), BF16(), strict, Dense()]
    for error, name in spawn(workers, switching, [c for c in sequence if c != BF16()]):
        assert error < 1e-6
        assert name == "Dense()"
    for error, _ in spawn(workers, switching, [strict, strict, strict]):
        assert error > 1e-4  # while it holds something back the balance is open


def detaching():
    model = scenes.ddp(scenes.net())
    forwards = [module.forward for module in scenes.net()]
    wire = gradwire.attach(model, VGC(alpha=1.0))
    list(scenes.train(model, range(3), scenes.sgd(model)))
    swapped = [f"{module.forward.__func__.__module__}" for module in model.module]
    wire.detach()
    model.module.load_state_dict(scenes.net().state_dict())
    optimizer = scenes.sgd(model, lr=0.0)
    list(scenes.train(model, range(1), optimizer))  # what was held back leaves with this one
    restored = [module.forward.__func__ is f.__func__ for module, f in zip(model.module, forwards, strict=True)]
    try:
        wire.compressor = Dense()
        message = ""
    except RuntimeError as error:
        message = str(error)
    prints = list(scenes.train(model, range(6), scenes.sgd(model)))
    again = gradwire.attach(model, VGC(alpha=1.0))
    list(scenes.train(model, range(2), scenes.sgd(model)))
    return any("gradwire" in name for name in swapped), all(restored), prints, message, again.stats().steps


def test_detach_gives_plain_ddp_back(spawn):
    plain = spawn(2, scenes.run, None, 6)[0]
    for swapped, restored, prints, message, steps in spawn(2, detaching):
        assert swapped
        assert restored
        assert prints == plain
        assert "detached" in message
        assert steps == 2


def freed():
    """Models come and go in a long process (a sweep): nothing of ours keeps them."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    list(scenes.train(model, range(3), scenes.sgd(model)))
    watched = [weakref.ref(model), weakref.ref(model.module), weakref.ref(wire._reducer)]
    del model, wire
    for _ in range(50):  # the courier's thread may still be on its way out of the last step
        gc.collect()
        if not any(reference() for reference in watched):
            break
        time.sleep(0.1)
    return [reference() is None for reference in watched]


def capture_on_a_cpu():
    wire = gradwire.attach(scenes.ddp(scenes.net()), VGC(alpha=1.0))
    with pytest.raises(GradwireError, match="CUDA graphs, and this model is on cpu"):
        wire.capture(torch.randn(4, 12))
    wire.release()  # of nothing


def test_capture_says_what_it_needs(spawn):
    spawn(2, capture_on_a_cpu)


def test_a_model_that_is_dropped_is_freed(spawn):
    assert spawn(1, freed) == [[True, True, True]]

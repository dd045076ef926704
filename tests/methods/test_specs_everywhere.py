"""A compressor may be given by its spec wherever one is given."""

from __future__ import annotations

import pytest
from torch import nn

import gradwire
import scenes
from gradwire import Dense, PowerSGD, TopK
from gradwire.methods import METHODS


def attached_by_spec():
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, "powersgd:rank=2")
    given = wire.compressor
    prints = list(scenes.train(model, range(3), scenes.sgd(model)))
    wire.compressor = "topk:density=0.1"
    for bad in ("topk:dens=1", "auto", "vcg"):
        with pytest.raises(ValueError, match="known: "):
            wire.compressor = bad
    return given, wire.compressor, prints


def test_attach_and_a_change_take_specs(spawn):
    straight = spawn(2, scenes.run, PowerSGD(rank=2), 3)
    for (given, changed, prints), expected in zip(spawn(2, attached_by_spec), straight, strict=True):
        assert given == PowerSGD(rank=2)
        assert changed == TopK(density=0.1)
        assert prints == expected


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def test_simulate_takes_specs():
    simulation = gradwire.simulate(scenes.net(), "topk:density=0.1", loss, workers=2)
    assert simulation.compressor == TopK(density=0.1)
    simulation.compressor = "topk:density=0.2"
    assert simulation.compressor == TopK(density=0.2)
    with pytest.raises(TypeError, match="the same method"):
        simulation.compressor = "dense"


def wrong():
    messages = []
    for bad in ("vcg", "vgc:alpha", "vgc:alpha=much", TopK, 3):
        with pytest.raises((TypeError, ValueError)) as error:
            gradwire.attach(scenes.ddp(scenes.net()), bad)
        messages.append(str(error.value))
    return messages, gradwire.attach(scenes.ddp(scenes.net()), "dense").compressor


def test_what_names_no_compressor_is_told_what_there_is(spawn):
    (((unknown, no_value, no_number, a_class, a_number), compressor),) = spawn(1, wrong)
    assert all(name in unknown for name in METHODS)
    assert "write option=value" in no_value
    assert "zeta" in no_value
    assert "expected float" in no_number
    for message in (a_class, a_number):
        assert "gradwire.VGC(alpha=1.5), or its spec, 'vgc:alpha=1.5'" in message
    assert compressor == Dense()
    with pytest.raises(ValueError, match="known: dense, bf16"):
        gradwire.simulate(scenes.net(), "vcg", loss, workers=2)

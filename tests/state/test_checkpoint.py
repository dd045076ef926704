"""State at rest: resume bit for bit, another number of workers, layers that came or went."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import VGC, Dense
from gradwire.errors import CheckpointError

VGC_1 = VGC(alpha=1.0)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 2, 7])
def test_resume_is_no_interruption(spawn, workers, stop):
    expected = spawn(workers, scenes.straight, VGC_1, 14)
    assert spawn(workers, scenes.interrupted, VGC_1, stop, 14, None) == expected


@pytest.mark.parametrize("compressor", [VGC(alpha=2.0, tau=0.01), VGC(alpha=1.0, feedback=True), Dense()], ids=repr)
def test_resume_of_the_variants(spawn, compressor):
    assert spawn(2, scenes.interrupted, compressor, 5, 10, None) == spawn(2, scenes.straight, compressor, 10)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_resume_through_a_distributed_checkpoint(spawn, workers, tmp_path):
    resumed = spawn(workers, scenes.interrupted, VGC_1, 6, 12, tmp_path / "wire")
    assert resumed == spawn(workers, scenes.straight, VGC_1, 12)


def load_and_train(directory):
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=2.0))
    gradwire.load(wire, directory)
    state = wire.state_dict()
    prints = list(scenes.train(model, range(6, 12), scenes.sgd(model)))
    return state, prints


def total(states, field, power):
    return {
        name: sum(state["parameters"][name][field].double() for state in states) / len(states) ** power
        for name in states[0]["parameters"]
    }


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (3, 1), (1, 2)])
def test_another_number_of_workers_keeps_the_mean_of_what_is_held_back(spawn, tmp_path, old, new):
    before = spawn(old, scenes.train_and_save, tmp_path / "wire", 6)
    results = spawn(new, load_and_train, tmp_path / "wire")
    after = [state for state, _ in results]
    assert all(prints == results[0][1] for _, prints in results)
    for field, power in (("residual", 1), ("variance", 2)):
        ours, theirs = total(after, field, power), total(before, field, power)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-9)
        assert max(float(t.abs().max()) for t in ours.values()) > 0
    assert [state["rank"] for state in after] == list(range(new))
    for rank in range(old, new):
        assert all(f["residual"].eq(0).all() for f in after[rank]["parameters"].values())
    resharded = gradwire.reshard(before, new)
    for state, expected in zip(after, resharded, strict=True):
        for name, fields in expected["parameters"].items():
            assert all(torch.equal(state["parameters"][name][field], value) for field, value in fields.items())


def channels_last():
    """A model whose weights lie in memory in another order: its state is saved in the parameters' shapes."""
    states = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3)).double()
        model = scenes.ddp(net.to(memory_format=memory_format))
        wire = gradwire.attach(model, VGC(alpha=1e-3, floor=1e6), strict=True)
        optimizer = scenes.sgd(model, lr=0.0)
        for step in range(3):
            x = torch.randn(5, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        states.append(wire.state_dict())
    other = gradwire.attach(scenes.ddp(copy.deepcopy(net)), VGC(alpha=1.0))
    other.load_state_dict(states[0])
    return states[0]["parameters"], states[1]["parameters"], other.state_dict()["parameters"]


def test_state_is_saved_in_the_parameters_shapes_whatever_their_memory_order(spawn):
    plain, last, loaded = spawn(1, channels_last)[0]
    for name, fields in plain.items():
        for field, value in fields.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(last[name][field], value, rtol=1e-5, atol=1e-9)
            assert torch.equal(loaded[name][field], value)


def changed_layers(strict):
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC_1)
    list(scenes.train(model, range(4), scenes.sgd(model)))
    state = wire.state_dict()
    grown = scenes.net()
    del grown[3]  # the layer norm goes, so 5 and 7 are 4 and 6 now
    grown.add_module("extra", nn.Linear(5, 5))
    other = gradwire.attach(scenes.ddp(grown), VGC_1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.load_state_dict(state, strict=strict)
    except CheckpointError as error:
        return str(error), other.state_dict()["parameters"], state
    return "; ".join(str(w.message) for w in caught), other.state_dict()["parameters"], state


def test_layers_that_came_or_went(spawn):
    for text, fields, state in spawn(2, changed_layers, False):
        assert "extra.weight" in text
        assert "3.weight" in text
        assert torch.equal(fields["0.weight"]["residual"], state["parameters"]["0.weight"]["residual"])
        assert fields["extra.weight"]["residual"].eq(0).all()
    for text, fields, _ in spawn(2, changed_layers, True):
        assert "strict=False" in text
        assert fields == {}  # nothing changed


def uneven(directory, double):
    """Ranks that use other layers hold other things back; and a program may compute in float64 by default."""
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        model = scenes.ddp(scenes.net().float(), find_unused_parameters=True)
        wire = gradwire.attach(model, VGC(alpha=4.0))
        optimizer = scenes.sgd(model)
        for step in range(5):
            x, y = scenes.batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.float()), y).backward()
            optimizer.step()
        wire.compressor = Dense()
        wire._reducer.store.set(
            {n: f for n, f in wire._reducer.store.items() if dist.get_rank() or n != "0.weight"}, POWERS
        )
        gradwire.save(wire, directory)
        before = scenes.state_of(wire, "residual")
        other = gradwire.attach(scenes.ddp(scenes.net().float()), VGC(alpha=4.0))
        gradwire.load(other, directory, strict=True)
        after = scenes.state_of(other, "residual")
        return all(torch.equal(before[name], after[name]) for name in before), float(after["2.weight"].abs().sum())
    finally:
        torch.set_default_dtype(torch.float32)


POWERS = {"residual": 1, "variance": 2}


@pytest.mark.parametrize("double", [False, True])
def test_ranks_that_hold_different_things_are_saved_whole(spawn, tmp_path, double):
    for equal, size in spawn(2, uneven, tmp_path / "wire", double):
        assert equal
        assert size > 0

"""A net wrapped in DDP and attached again: a notebook cell run twice, layers thawed, a Trainer that trains twice."""

from __future__ import annotations

import gc
import io
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC, Dense, PowerSGD, TopK
from gradwire.errors import AttachError, DisagreementError, GradwireError

STRICT = VGC(alpha=4.0, feedback=True)


def attached(net, compressor, **options):
    """The cell."""
    model = scenes.ddp(net, **options)
    return model, gradwire.attach(model, compressor)


def in_two_parts(compressor, dropped):
    """Six steps, wrapped anew after the third; `dropped`: nothing of the first wrapping is left but the net."""
    net = scenes.net()
    model, wire = attached(net, compressor)
    optimizer = scenes.sgd(net)
    prints = list(scenes.train(model, range(3), optimizer))
    held = scenes.held(wire)
    if dropped:
        del model, wire
        gc.collect()
    model, wire = attached(net, compressor)
    carried = scenes.held(wire)
    prints += list(scenes.train(model, range(3, 6), optimizer))
    return prints, held, carried, wire.steps, wire.stats().steps


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), TopK(density=0.05), PowerSGD(rank=2)], ids=repr)
def test_the_run_goes_on_bit_for_bit(spawn, compressor, dropped):
    straight = spawn(2, scenes.run, compressor, 6)[0]
    for prints, held, carried, steps, counted in spawn(2, in_two_parts, compressor, dropped):
        assert prints == straight
        assert held == carried > 0
        assert (steps, counted) == (6, 3)


def balance(last, detached):
    """What arrived minus what was computed, with lr = 0; before the last steps the net is wrapped anew."""
    net, plain = scenes.net(), scenes.net()
    total = [torch.zeros_like(p, dtype=torch.float64) for p in plain.parameters()]
    optimizer = scenes.sgd(net, lr=0.0)
    for step in range(6):
        if step in (0, 4):
            model, wire = attached(net, STRICT if step == 0 else last)
        if step == 3 and detached:
            wire.detach()
            model, wire = attached(net, STRICT)  # before the step that would have taken all along
        x, y = scenes.batch(step)
        for one in (model, plain):
            one.zero_grad()
            nn.functional.cross_entropy(one(x), y).backward()
        optimizer.step()
        for sum_, p, q in zip(total, net.parameters(), plain.parameters(), strict=True):
            mean = q.grad.double() / dist.get_world_size()
            dist.all_reduce(mean)
            sum_ += p.grad - mean
    return max(float(sum_.abs().max()) for sum_ in total), wire.stats().residual_norm


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("last", [Dense(), "auto", STRICT], ids=repr)
def test_nothing_that_was_held_back_is_lost(spawn, last, detached):
    for error, left in spawn(2, balance, last, detached):
        if last is STRICT:
            assert error > 1e-4  # while something is held back the balance is open
            assert left > 0
        else:
            assert error < 1e-6
            assert left == 0


def thawed():
    net = scenes.net()
    net[0].requires_grad_(False)
    model, wire = attached(net, STRICT)
    list(scenes.train(model, range(4), scenes.sgd(net)))
    before = scenes.state_of(wire, "residual")
    net[0].requires_grad_(True)
    net[7] = nn.Linear(24, 5)  # and a new head, of the same name and shape
    model, wire = attached(net, STRICT)
    after = scenes.state_of(wire, "residual")
    prints = list(scenes.train(model, range(4, 8), scenes.sgd(net)))
    return before, after, prints, {row.kind for row in wire.coverage()}


def test_thawed_layers_and_new_ones_start_from_zero(spawn):
    results = spawn(2, thawed)
    for before, after, prints, kinds in results:
        assert prints == results[0][2]
        assert len(set(prints)) == 4
        assert kinds == {"exact"}
        assert after.keys() - before.keys() == {"0.weight", "0.bias"}
        for name, residual in after.items():
            kept = name in before and not name.startswith("7.")
            assert bool(residual.any()) == kept
            assert not kept or torch.equal(residual, before[name])


def the_older_model(compressor):
    net = scenes.net()
    old, old_wire = attached(net, compressor)
    list(scenes.train(old, range(2), scenes.sgd(net)))
    model, wire = attached(net, VGC(alpha=1.0))
    before = wire.state_dict()["parameters"]
    optimizer = scenes.sgd(net)
    with pytest.raises(GradwireError, match="its net was wrapped anew"):
        next(scenes.train(old, range(2, 3), optimizer))
    with torch.no_grad():
        old(scenes.batch(2)[0])  # which trains nothing
    with pytest.raises(GradwireError, match="a newer one has its net"):
        old_wire.compressor = TopK()
    with pytest.raises(AttachError, match="wrap it once more"):
        gradwire.attach(old, VGC())
    after = wire.state_dict()["parameters"]
    untouched = all(torch.equal(before[name][field], after[name][field]) for name in before for field in before[name])
    list(scenes.train(model, range(2, 4), optimizer))
    return untouched, scenes.digest(net.parameters()), wire.steps, old_wire.stats().steps


@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), Dense(), "auto"], ids=repr)
def test_the_older_model_and_wire_say_that_they_are_over(spawn, compressor):
    one, other = spawn(2, the_older_model, compressor)
    assert one == other
    assert one[0]
    assert one[2:] == (4, 2)


class Fails(torch.autograd.Function):
    """A backward that raises after the last layers' buckets are on their way."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def interrupted(late):
    """late: the courier of rank 0 is still busy when the step is given up."""
    net = scenes.net()
    model, wire = attached(net, VGC(alpha=1.0))
    list(scenes.train(model, range(4), scenes.sgd(net)))
    before = wire.state_dict()["parameters"]
    handle = net[2].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    if late and dist.get_rank() == 0:
        wire._reducer._pipeline._courier.submit(lambda: time.sleep(1))
    with pytest.raises(MemoryError):
        next(scenes.train(model, range(4, 5), scenes.sgd(net)))
    handle.remove()
    x, y = scenes.batch(4)
    gradients = scenes.net()
    gradients.load_state_dict(net.state_dict())
    nn.functional.cross_entropy(gradients(x), y).backward()
    model, wire = attached(net, VGC(alpha=1.0))
    after = wire.state_dict()["parameters"]
    whole = []
    for name, parameter in gradients.named_parameters():
        old, new = (state[name]["residual"] for state in (before, after))
        with_it = torch.isclose(new, old + parameter.grad, rtol=1e-4, atol=1e-6)
        whole.append(bool((torch.isclose(new, old, rtol=1e-5, atol=1e-7) | with_it).all()))
    return all(whole), list(scenes.train(model, range(4, 7), scenes.sgd(net)))


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_broke_off_is_taken_back(spawn, late):
    """Every element holds what it held, or that and its gradient: nothing was sent and lost."""
    results = spawn(2, interrupted, late)
    for whole, prints in results:
        assert whole
        assert prints == results[0][1]
        assert len(set(prints)) == 3


def refused_once():
    net = scenes.net()
    model, wire = attached(net, STRICT)
    list(scenes.train(model, range(3), scenes.sgd(net)))
    held = scenes.held(wire)
    model = scenes.ddp(net)
    with pytest.raises(DisagreementError):
        gradwire.attach(model, VGC(alpha=1.0 + dist.get_rank()))
    with pytest.raises(ValueError, match="estimator"):
        gradwire.attach(model, STRICT, estimator="magic")
    return held, scenes.held(gradwire.attach(model, STRICT))


def test_an_attach_that_is_refused_can_be_done_again(spawn):
    for held, carried in spawn(2, refused_once):
        assert held == carried > 0


def in_another_group():
    net = scenes.net()
    model, wire = attached(net, STRICT)
    list(scenes.train(model, range(3), scenes.sgd(net)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, wire = attached(net, STRICT, process_group=dist.new_group())
    prints = list(scenes.train(model, range(3), scenes.sgd(net)))
    return [str(one.message) for one in caught if "gradwire" in str(one.message)], wire.steps, prints


def test_in_another_group_it_starts_anew_and_says_so(spawn):
    results = spawn(2, in_another_group)
    for (message,), steps, prints in results:
        assert "another process group" in message
        assert steps == 3
        assert prints == results[0][2]


class Branch(nn.Module):
    def __init__(self, trunk, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.head = trunk, nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.trunk(x))


def shared_trunk():
    """Two models at once over one trunk: an honest error, and what it says to do works to the letter."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(12, 24), nn.Tanh())
    first, other = (scenes.ddp(Branch(trunk, seed)) for seed in (1, 2))
    wire = gradwire.attach(first, VGC(alpha=1.0))
    list(scenes.train(first, range(2), scenes.sgd(first)))
    with pytest.raises(AttachError, match="for another model that shares it") as error:
        gradwire.attach(other, VGC(alpha=1.0))
    # "give one of the two a method without second moments"
    gradwire.attach(other, TopK()).detach()
    list(scenes.train(other, range(1), scenes.sgd(other)))
    # "wire.detach() it and train it one step more"
    wire.detach()
    list(scenes.train(first, range(2, 3), scenes.sgd(first)))
    again = gradwire.attach(other, VGC(alpha=1.0))
    return str(error.value), list(scenes.train(other, range(3), scenes.sgd(other))), again.stats().steps


def test_a_trunk_of_two_models_at_once(spawn):
    (message, *one), (_, *other) = spawn(2, shared_trunk)
    assert one == other
    assert "'trunk.0' (Linear)" in message
    assert one[1] == 3


def layers_in_a_new_net():
    """A cell that makes the net too, of layers that another cell has: the model of the run before is gone."""
    layers = list(scenes.net())
    prints = []
    for run in range(3):
        model = scenes.ddp(nn.Sequential(*layers))
        wire = gradwire.attach(model, STRICT)
        prints += scenes.train(model, range(2 * run, 2 * run + 2), scenes.sgd(model))
    newer = scenes.ddp(nn.Sequential(*layers))
    with pytest.raises(AttachError, match="del it if nothing trains it any more"):
        gradwire.attach(newer, STRICT)
    del model
    again = gradwire.attach(newer, STRICT)
    prints += scenes.train(newer, range(6, 8), scenes.sgd(newer))
    return prints, wire.steps, again.steps, {row.kind for row in again.coverage()}


def test_layers_in_a_new_net_start_anew_where_the_older_model_is_gone(spawn):
    one, other = spawn(2, layers_in_a_new_net)
    assert one == other
    assert len(set(one[0])) == 8
    assert one[1:] == (2, 2, {"exact"})


def saved_whole():
    net = scenes.net()
    attached(net, VGC(alpha=1.0))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    model, wire = attached(loaded, VGC(alpha=1.0))
    list(scenes.train(model, range(2), scenes.sgd(loaded)))
    return wire.steps, b"gradwire.adapters.ddp" in file.getvalue(), type(model) is DistributedDataParallel


def test_a_net_that_is_saved_whole_takes_no_link_along(spawn):
    assert spawn(1, saved_whole) == [(2, False, True)]

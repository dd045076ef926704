"""GradScaler: r and v in units of 1 whatever the scale does; one inf on one rank skips the step everywhere alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import VGC

SPOILED = 5


SCALED = {"basic": VGC(alpha=1.0), "hybrid": VGC(alpha=1.0, tau=0.01), "momentum": VGC(alpha=0.2, momentum=0.5)}


@pytest.mark.parametrize("compressor", SCALED.values(), ids=SCALED)
def test_a_changing_scale_changes_no_bit(spawn, compressor):
    steady = spawn(2, scenes.scaled_run, compressor, [1.0], 10)
    changing = spawn(2, scenes.scaled_run, compressor, [1024.0, 65536.0, 2.0, 0.5], 10)
    plain = spawn(2, scenes.run, compressor, 10)
    assert steady[0][0] == changing[0][0] == plain[0][-1]
    for (_, held), (_, other) in zip(steady, changing, strict=True):
        assert {"residual", "variance"} <= held["0.weight"].keys()
        torch.testing.assert_close(held, other, rtol=0, atol=0)


def one_inf(where):
    """One bad value on rank 1 at one step. Returns what each rank saw around it."""
    model = scenes.ddp(scenes.net())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wire = gradwire.attach(model, VGC(alpha=1.0), scaler=scaler)
    optimizer = scenes.sgd(model)
    prints, states, finite, grads, sent = [], [], [], {}, {}
    for step in range(9):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        handles = []
        if step == SPOILED and dist.get_rank() == 1:
            target = dict(model.module.named_parameters())[where]
            handles = [target.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), float("inf")))]
        if step == SPOILED:
            local = scenes.net()
            local.load_state_dict(model.module.state_dict())
            nn.functional.cross_entropy(local(x), y).backward()
            grads = {name: p.grad for name, p in local.named_parameters()}
            counts = wire.stats().elements_sent
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == SPOILED:
            sent = {name: n - counts[name] for name, n in wire.stats().elements_sent.items()}
        for handle in handles:
            handle.remove()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        prints.append(scenes.digest(model.parameters()))
        states.append(wire.state_dict()["parameters"])
    return prints, states, finite, grads, sent, scaler.get_scale()


@pytest.mark.parametrize("where", ["0.weight", "7.bias", "3.weight"])
def test_one_inf_on_one_rank_skips_the_step_and_loses_nothing(spawn, where):
    results = spawn(2, one_inf, where)
    for rank, (prints, states, finite, grads, sent, scale) in enumerate(results):
        assert finite == [step != SPOILED for step in range(9)]
        assert prints[SPOILED] == prints[SPOILED - 1]  # skipped
        assert len(set(prints)) == 8  # and all the others moved
        assert prints == results[0][0]
        assert scale == 128.0
        assert sum(sent.values()) > 20  # so there was something to undo
        before, after = states[SPOILED - 1], states[SPOILED]
        for name in before:
            bad = torch.zeros_like(before[name]["residual"], dtype=torch.bool)
            if rank == 1 and name == where:
                bad[1] = True
            old, new = before[name]["residual"], after[name]["residual"]
            assert torch.equal(new[bad], old[bad])  # a bad value added nothing
            # all others hold what they held and this step's gradient: r + g, sent or not
            torch.testing.assert_close(new[~bad], (old + grads[name])[~bad], rtol=1e-5, atol=1e-7)
            grown = after[name]["variance"] >= before[name]["variance"] * 0.999 * 0.99999
            assert bool(grown.all())  # v came back too: nothing was reset


def undo_bits():
    """The same step with and without an inf elsewhere: sent elements have bit for bit what they had before the send."""
    outcomes = []
    for spoil in (False, True):
        model = scenes.ddp(scenes.net())
        wire = gradwire.attach(
            model, VGC(alpha=1.0, feedback=False), scaler=torch.amp.GradScaler("cpu", init_scale=1.0)
        )
        optimizer = scenes.sgd(model, lr=0.0)
        for step in range(3):
            x, y = scenes.batch(step)
            optimizer.zero_grad()
            handle = None
            if spoil and step == 2 and dist.get_rank() == 0:
                handle = model.module[0].bias.register_hook(lambda g: g * float("nan"))
            before = wire.state_dict()["parameters"]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if handle:
                handle.remove()
        outcomes.append((before, wire.state_dict()["parameters"]))
        wire.detach()
    return outcomes


def test_sent_elements_have_their_r_and_v_back_bit_for_bit(spawn):
    for (before, clean), (same_before, undone) in spawn(2, undo_bits):
        n_sent = 0
        for name in clean:
            assert torch.equal(before[name]["residual"], same_before[name]["residual"])
            sent = (clean[name]["residual"] == 0) & (undone[name]["residual"] != 0)
            kept = ~sent & (clean[name]["residual"] != 0)
            n_sent += int(sent.sum())
            if name == "0.bias":
                continue
            assert torch.equal(clean[name]["residual"][kept], undone[name]["residual"][kept])
            assert torch.equal(clean[name]["variance"][kept], undone[name]["variance"][kept])
            # undone v is v + m; the clean run's v is 0 there: it is back, and above what it was
            assert bool((undone[name]["variance"][sent] > 0).all())
        assert n_sent > 20

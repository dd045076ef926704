"""SAM and LBFGS, several gradients a step: what docs/methods.md says to write, run as it stands there."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import VGC, Dense

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"
LOSS = nn.functional.cross_entropy


def recipe(name):
    block = DOCS.read_text().split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
    return compile(block.strip().removeprefix("```python").removesuffix("```"), name, "exec")


def run(name, compressor, n_steps=6):
    """The recipe as a training: fingerprints after every step, and how many exchanges there were."""
    model = scenes.ddp(scenes.net())
    wire = None if compressor is None else gradwire.attach(model, compressor)
    make = torch.optim.LBFGS if name == "lbfgs" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05)
    code, prints = recipe(name), []
    for step in range(n_steps):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        names = {"model": model, "optimizer": optimizer, "x": x, "y": y, "loss": LOSS, "rho": 0.05}
        exec(code, {**names, "torch": torch, "dist": dist})
        prints.append(scenes.digest(model.parameters()))
    return prints, wire.steps if wire else 0


def test_sam_exchanges_one_gradient_a_step(spawn):
    plain = spawn(2, run, "sam", None)
    assert spawn(2, run, "sam", Dense())[0][0] == plain[0][0]
    (one, steps), (other, _) = spawn(2, run, "sam", VGC(alpha=1.0))
    assert one == other
    assert len(set(one)) == steps == 6


def second_gradients():
    """What arrived minus the mean of the second gradients, with lr = 0."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=4.0, feedback=True))
    optimizer = scenes.sgd(model, lr=0.0)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for step in range(5):
        if step == 4:
            wire.compressor = Dense()
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        alone = copy.deepcopy(model.module)
        first = torch.autograd.grad(LOSS(alone(x), y), list(alone.parameters()))
        norm = torch.stack([g.norm() for g in first]).norm()
        with torch.no_grad():
            for p, g in zip(alone.parameters(), first, strict=True):
                p.add_(g, alpha=float(0.05 / norm))
        LOSS(alone(x), y).backward()
        names = {"model": model, "optimizer": optimizer, "x": x, "y": y, "loss": LOSS, "rho": 0.05}
        exec(recipe("sam"), {**names, "torch": torch})
        for sum_, p, q in zip(total, model.parameters(), alone.parameters(), strict=True):
            mean = q.grad.double() / dist.get_world_size()
            dist.all_reduce(mean)
            sum_ += p.grad - mean
    return max(float(sum_.abs().max()) for sum_ in total), scenes.held(wire)


def test_sam_delivers_the_second_gradient_and_nothing_of_the_first(spawn):
    for error, left in spawn(2, second_gradients):
        assert error < 1e-6
        assert left == 0


def naive_sam():
    """Without no_sync both gradients are exchanged: the guard sees that the parameters moved."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    optimizer = scenes.sgd(model)
    x, y = scenes.batch(0)
    LOSS(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=0.01)
    LOSS(model(x), y).backward()
    optimizer.step()
    return wire.steps


def test_what_the_page_says_of_the_guard(spawn):
    assert spawn(2, naive_sam) == [2, 2]
    for _, exchanges in spawn(2, run, "lbfgs", VGC(alpha=1.0), 1):
        assert exchanges > 1


def test_lbfgs_is_that_of_plain_ddp(spawn):
    plain, dense = spawn(2, run, "lbfgs", None, 3), spawn(2, run, "lbfgs", Dense(), 3)
    for (prints, exchanges), (expected, _) in zip(dense, plain, strict=True):
        assert prints == expected == plain[0][0]
        assert exchanges > 3

"""VGC with alpha = 0 keeps the residual alone: the same elements as with a variance beside it; states that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
import scenes
from gradwire import VGC, Strom
from gradwire.codec import CHUNK, Codec, Inputs, Rule, reference
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods.base import powers

CPU = torch.device("cpu")
SIZES = [33, 1, 0, 65537, 5000, 31]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))
RULES = {
    "density": Rule(0.0, 0.9, None, 0.0, False, "paper", 0.02),
    "density, floor, feedback": Rule(0.0, 0.9, None, 2.0, True, "unbiased", 0.1),
    "floor": Rule(0.0, 0.9, None, 2.0, False, "paper"),
    "floor and feedback": Rule(0.0, 0.9, None, 2.0, True, "paper"),
    "tau": Rule(0.0, 0.9, 0.7, 0.0, False, "paper"),
}
STATES = {
    VGC(alpha=0, density=0.01): ["residual"],
    VGC(alpha=0, floor=0.1): ["residual"],
    VGC(alpha=0, density=0.01, momentum=0.9): ["residual", "velocity"],
    VGC(alpha=1.0, density=0.01): ["residual", "variance"],
    VGC(alpha=1.0, momentum=0.9): ["residual", "variance", "velocity"],
    Strom(0.1): ["residual"],
}


def codecs() -> list[Codec]:
    from gradwire.codec.cpu import codec

    return [reference, codec]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("share", [1.0, 0.05])
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_the_same_elements_and_residuals(rule: Rule, share: float, chunk: int) -> None:
    """Against the definition with a variance that counts for nothing."""
    capacity = tuple(int(share * size) for size in SIZES)
    residual, variance, zeros = (torch.zeros(LAYOUT.numel) for _ in range(3))
    lean, n_sent = [torch.zeros(LAYOUT.numel) for _ in codecs()], 0
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(LAYOUT.numel, generator=generator) * torch.rand(LAYOUT.numel, generator=generator).exp()
        if step == 2:
            grad[[3, 700, 66000]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        active = torch.tensor([True, False, True, step != 1, True, True]) if step else None
        common = (LAYOUT, rule, capacity, step, chunk)
        wanted = reference.select(Inputs(grad, zeros, residual, variance, active), *common)
        found = [
            codec.select(Inputs(grad, None, r, None, active), *common) for codec, r in zip(codecs(), lean, strict=True)
        ]
        for one in found:
            for name in ("words", "counts", "codes", "exponents", "passed", "finite"):
                assert torch.equal(getattr(one, name), getattr(wanted, name)), name
        if step == 3:
            for one in (wanted, *found):
                one.undo()
        assert all(torch.equal(r, residual) for r in lean)
        n_sent += int(wanted.counts.sum())
    assert n_sent > 100


@pytest.mark.parametrize(("method", "fields"), STATES.items(), ids=repr)
def test_what_is_kept(method: Any, fields: list[str]) -> None:
    assert list(powers(method.init(LAYOUT, CPU))) == fields


def gradients(step: int) -> tuple[Tensor, Tensor]:
    samples = torch.randn(3, 4, LAYOUT.numel, generator=torch.Generator().manual_seed(step)) + 0.1
    return samples.sum(1), samples.square().sum(1)


@pytest.mark.parametrize("batched", [False, True])
def test_alpha_changes_in_mid_run(batched: bool) -> None:
    """What is held back stays; a variance begins at zero."""
    weighed, lean = VGC(alpha=1.0, density=0.02), VGC(alpha=0, density=0.02)
    ranks = InProcess(weighed, LAYOUT, 3, batched=batched)
    for step, method in enumerate((weighed, weighed, lean, lean, weighed)):
        before = [state.residual.clone() for state in ranks.states]
        ranks.use(method)
        assert all(torch.equal(state.residual, one) for state, one in zip(ranks.states, before, strict=True))
        assert all(("variance" in powers(state)) == (method is weighed) for state in ranks.states)
        if step == 4:
            assert not any(state.variance.any() for state in ranks.states)
        ranks.exchange(*gradients(step))
    assert all(state.variance.any() for state in ranks.states)


def loaded(first: VGC, second: VGC) -> tuple[bool, dict[str, list[str]]]:
    """Two steps with one, its state into another run with the other: is the residual there, and what is held then."""
    states = []
    for method in (first, second):
        model = scenes.ddp(scenes.net())
        wire, optimizer = gradwire.attach(model, method), scenes.sgd(model)
        if states:
            wire.load_state_dict(states[0])
            for name, fields in wire.state_dict()["parameters"].items():
                assert torch.equal(fields["residual"], states[0]["parameters"][name]["residual"])
        list(scenes.train(model, range(2), optimizer))
        states.append(wire.state_dict())
    moved = any(bool(fields["residual"].any()) for fields in states[0]["parameters"].values())
    return moved, {name: sorted(fields) for name, fields in states[1]["parameters"].items()}


@pytest.mark.parametrize("back", [False, True])
def test_a_state_loads_with_and_without_a_variance(spawn: Any, back: bool) -> None:
    methods = [VGC(alpha=2.0, feedback=True), VGC(alpha=0, density=0.02, feedback=True)]
    for moved, fields in spawn(2, loaded, *(methods[::-1] if back else methods)):
        assert moved
        assert all(held == (["residual", "variance"] if back else ["residual"]) for held in fields.values())

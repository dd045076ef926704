"""VGC with a density: the reference against scalar Python, the CPU's kernels against the reference, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drawn import layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import INPUTS, RULES, ByScore, extreme, faint, heavy, plain
from test_triton import same
from test_triton_density import changing
from torch import Tensor

from gradwire.codec import CHUNK, Inputs, Rule, Selection, reference
from gradwire.codec import words as wire_words
from gradwire.codec.cpu import codec as cpu
from gradwire.codec.limits import BINS, limits
from gradwire.codec.quota import Quota
from gradwire.compile.threads import SMALL
from gradwire.layout import Layout


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_reference_is_the_definition(rule: Rule, inputs: Callable[[Layout, int], tuple[Tensor, Tensor]]) -> None:
    sizes = [33, 1, 0, 300, 31]
    layout, worker = layout_of(sizes), ByScore(sizes, **dataclasses.asdict(rule))
    state, n_sent = [torch.zeros(layout.numel) for _ in range(2)], 0
    for step in range(6):
        grad, moment = inputs(layout, step)
        if inputs is extreme:  # anew, since twice 3e38 is infinite
            state, worker = [torch.zeros(layout.numel) for _ in range(2)], ByScore(sizes, **dataclasses.asdict(rule))
        found = reference.select(Inputs(grad, moment, *state), layout, rule, tuple(sizes), step, CHUNK)
        with np.errstate(all="ignore"):
            wanted = worker.step(grad.numpy(), moment.numpy())
        index, code = wire_words.unpack(found.words[: int(found.counts.sum())], found.counts, CHUNK)
        values = reference.values(index, code, found.exponents, layout, rule)
        assert dict(zip(index.tolist(), values.tolist(), strict=True)) == {i: float(x) for i, x in wanted.items()}
        assert torch.equal(state[0], torch.tensor(np.array(worker.r)))
        assert torch.equal(state[1], torch.tensor(np.array(worker.v)))
        n_sent += len(wanted)
    assert n_sent > 10


def test_limits_of_histograms_by_hand() -> None:
    layout = layout_of([100, 100, 100, 100, 0])
    histogram = torch.zeros(5, BINS, dtype=torch.int32)
    histogram[0, [2040, 2032]] = torch.tensor([6, 20], dtype=torch.int32)  # 4 of the 20 are missing
    histogram[1, [2040, 2032]] = torch.tensor([10, 20], dtype=torch.int32)  # all of the higher bin, none of the lower
    histogram[2, [4080, 0]] = torch.tensor([3, 7], dtype=torch.int32)  # just as many as wanted
    histogram[3, 0] = 100
    rule = Rule(0.0, 0.9, None, 0.0, False, "paper", 0.1)
    wanted = [(2033 << 19) - (4 << 19) // 20, 2033 << 19, 1, (1 << 19) - (10 << 19) // 100, 1]
    assert limits(histogram, layout, rule).tolist() == wanted
    assert limits(histogram.long(), layout, rule).dtype == torch.int32
    four = int(torch.tensor(4.0).view(torch.int32))
    floored = limits(histogram, layout, dataclasses.replace(rule, floor=2.0)).tolist()
    assert floored == [max(limit, four + 1) for limit in wanted]


def both(
    sizes: list[int], rule: Rule, step: int, states: list[list[Tensor]], share: float, chunk: int, **given: Any
) -> list[Selection]:
    """One step of the reference and of the CPU's kernels, which are alike in everything."""
    layout = layout_of(sizes)
    grad, moment = given.get("inputs", plain(layout, step))
    active, common = given.get("active"), (layout, rule, tuple(int(share * size) for size in sizes), step, chunk)
    found = [
        kernel.select(Inputs(grad, moment, *state, active), *common)
        for kernel, state in zip((reference, cpu), states, strict=True)
    ]
    same(*found)
    assert all(map(torch.equal, *states))
    return found


def zeros(sizes: list[int]) -> list[list[Tensor]]:
    return [[torch.zeros(sum(sizes)) for _ in range(2)] for _ in range(2)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("share", [1.0, 0.05])
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_many_steps_on_the_cpu(rule: Rule, share: float, chunk: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    sizes = [33, 1, 0, 65537, 5000, 31]
    states, n_sent = zeros(sizes), 0
    for step in range(4):
        inputs = plain(layout_of(sizes), step)
        if step == 2:
            inputs[0][[3, 700, 66000]], inputs[1][40] = torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.inf
        active = torch.tensor([True, False, True, step != 1, True, True]) if step else None
        found = both(sizes, rule, step, states, share, chunk, inputs=inputs, active=active)
        assert bool(found[0].finite) == (step != 2)
        n_sent += int(found[0].counts.sum())
        if step == 3:
            for selection in found:
                selection.undo()
            assert all(map(torch.equal, *states))
    assert n_sent > 100
    torch.set_num_threads(before)


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from(sorted(RULES)),
    st.sampled_from(sorted(INPUTS)),
    st.floats(0.01, 1),
)
@settings(max_examples=40, deadline=None)
def test_any_sizes_densities_and_inputs(sizes: list[int], seed: int, name: str, inputs: str, density: float) -> None:
    rule, states = dataclasses.replace(RULES[name], density=density), zeros(sizes)
    for step in range(2):
        both(sizes, rule, step, states, 1.0, CHUNK, inputs=INPUTS[inputs](layout_of(sizes), seed + step))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 2.0**-126, 1e-22, -1.0, 1e19, 3.4e38])
def test_everything_alike(value: float) -> None:
    """All pass, or none."""
    sizes = [SMALL * 2 + 5, 3]
    inputs = torch.full((sum(sizes),), value), torch.zeros(sum(sizes))
    found = both(sizes, RULES["top-k"], 0, zeros(sizes), 1.0, CHUNK, inputs=inputs)
    assert int(found[0].passed[0]) in (0, sizes[0])


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.125, 0.5, 1.0])
def test_about_as_many_pass_as_are_wanted(alpha: float, density: float) -> None:
    sizes = [20000, 5000, 700, 64, 1000, 10]
    layout, rule = layout_of(sizes), Rule(alpha, 0.999, None, 0.0, False, "paper", density)
    state, n_passed = [torch.zeros(layout.numel) for _ in range(2)], 0
    for step in range(30):
        grad, moment = heavy(layout, step)
        sums = state[0] + grad, state[1] + moment
        n_passed += int(reference.decide_by_score(*sums, None, layout, rule).sum())
        cpu.select(Inputs(grad, moment, *state), layout, rule, tuple(sizes), step, CHUNK)
    wanted = 30 * Quota.of(layout, density).total
    assert 0.9 * wanted < n_passed < 1.1 * wanted, n_passed / wanted


def test_zeros_do_not_count() -> None:
    """Seven of eight are wanted: all that there are pass, whatever their scores."""
    inputs = plain(layout_of([90, 9000]), 0)
    faint(*inputs)
    found = both([90, 9000], RULES["3/2, more than there are"], 0, zeros([90, 9000]), 1.0, CHUNK, inputs=inputs)
    assert found[0].passed.tolist() == [10, 1000]


def test_a_density_that_changes_on_the_cpu() -> None:
    changing(cpu.select, "cpu")

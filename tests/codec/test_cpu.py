"""The compiled kernels of the CPU against the reference: same words, same counts, same state, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codec import CHUNK, Inputs, Rule, Selection, reference
from gradwire.codec.cpu import codec as cpu
from gradwire.compile.threads import SMALL
from gradwire.layout import Layout

RULES = {
    "basic": Rule(1.0, 0.999, None, 0.0, False, "paper"),
    "unbiased feedback": Rule(1.5, 0.9, None, 0.0, True, "unbiased"),
    "hybrid": Rule(2.0, 0.9, 0.1, 0.0, False, "paper"),
    "floor": Rule(1.0, 0.99, None, 0.5, True, "paper"),
    "threshold": Rule(0.0, 0.99, None, 2.0, False, "paper"),
}
SIZES = [33, 1, 0, 65537, 5000, 31]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layout_of(sizes: list[int]) -> Layout:
    return Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(sizes))


def draw(layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """Over many binades, with noise that lets some pass."""
    generator = torch.Generator().manual_seed(seed)
    one, two, three = (torch.rand(layout.numel, generator=generator) for _ in range(3))
    grad = (one - 0.5) * (two * 12).exp()
    return grad, grad.square() * three * 2


def same(left: Selection, right: Selection) -> None:
    for name in ("words", "counts", "codes", "exponents", "passed", "finite"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("share", [1.0, 0.05, 0.0])
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_many_steps_are_those_of_the_reference(rule: Rule, share: float, chunk: int) -> None:
    layout = layout_of(SIZES)
    capacity = tuple(int(share * size) for size in SIZES)
    states = [(torch.zeros(layout.numel), torch.zeros(layout.numel)) for _ in range(2)]
    sent = []
    for step in range(5):
        grad, moment = draw(layout, step)
        if step == 2:
            grad[[3, 700, 66000]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            moment[40] = torch.inf
        active = torch.tensor([True, False, True, step != 1, True, True]) if step else None
        found = [
            kernel.select(Inputs(grad, moment, *state, active), layout, rule, capacity, step, chunk)
            for kernel, state in zip((reference, cpu), states, strict=True)
        ]
        same(*found)
        if step == 3:
            for selection in found:
                selection.undo()
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        sent.append(int(found[0].codes.sum()))
        assert bool(found[0].finite) == (step != 2)
    assert max(sent) <= sum(capacity)
    assert (max(sent) > 100) == (share > 0)  # it binds at 0.05, and something goes


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from(sorted(RULES)),
    st.floats(0, 1),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_any_sizes_and_capacities(sizes: list[int], seed: int, name: str, share: float, step: int) -> None:
    layout, rule = layout_of(sizes), RULES[name]
    grad, moment = draw(layout, seed)
    capacity = tuple(int(share * size) for size in sizes)
    states = [(torch.zeros(layout.numel), torch.zeros(layout.numel)) for _ in range(2)]
    found = [
        kernel.select(Inputs(grad, moment, *state), layout, rule, capacity, step, CHUNK)
        for kernel, state in zip((reference, cpu), states, strict=True)
    ]
    same(*found)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("grad", [0.0, 1e-40, 2.0**-127, 2.0**-126, 1e38, 3.4e38, -3.4e38])
def test_everything_nothing_and_the_ends_of_float32(grad: float) -> None:
    layout = layout_of([SMALL * 2 + 5, 3])
    inputs = torch.full((layout.numel,), grad), torch.zeros(layout.numel)
    rule = dataclasses.replace(RULES["threshold"], floor=0.0, alpha=0.5)
    states = [(torch.zeros(layout.numel), torch.zeros(layout.numel)) for _ in range(2)]
    for step in range(2):  # twice 3.4e38 is infinite
        found = [
            kernel.select(Inputs(*inputs, *state), layout, rule, (SMALL * 2 + 5, 3), step, CHUNK)
            for kernel, state in zip((reference, cpu), states, strict=True)
        ]
        same(*found)
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_messages_are_checked_and_added_alike(rule: Rule, chunk: int) -> None:
    layout = layout_of(SIZES)
    found = [
        reference.select(
            Inputs(*draw(layout, rank), torch.zeros(layout.numel), torch.zeros(layout.numel)),
            layout,
            rule,
            tuple(SIZES),
            0,
            chunk,
        )
        for rank in range(3)
    ]
    words, counts, exponents = (
        torch.stack([getattr(f, name) for f in found]) for name in ("words", "counts", "exponents")
    )
    outs = []
    for kernel in (reference, cpu):
        outs.append(torch.full((layout.numel,), 7.0))
        assert not kernel.add(words, counts, torch.ones(3).bool(), exponents, layout, rule, chunk, outs[-1]).any()
        sums = [kernel.checksum(words), kernel.checksum(words[1])]
        assert torch.equal(sums[0][1], sums[1])
        outs.append(sums[0])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert int((outs[0] != 0).sum()) > 1000


@pytest.mark.parametrize("kernel", [reference, cpu], ids=lambda kernel: kernel.__name__)
def test_bad_places_and_exponents_are_found(kernel) -> None:
    layout, rule = layout_of([40]), RULES["basic"]
    for words, exponent, wanted in [
        ([1, 5, 39], 0, [False, False]),
        ([1, 5, 40], 0, [True, False]),
        ([5, 5, 6], 0, [True, False]),
        ([6, 5, 7], 0, [True, False]),
        ([1, 5, (1 << 28) - 1], 0, [True, False]),
        ([1, 5, 7], -127, [False, True]),
        ([1, 5, 7 | 1 << 28], -126, [False, True]),
    ]:
        inputs = torch.tensor([words, [1, 2, 3]], dtype=torch.int32), torch.tensor([[3], [3]], dtype=torch.int32)
        exponents = torch.tensor([[exponent], [0]], dtype=torch.int32)
        for sound in ([True, True], [True, False], [False, False]):
            out = torch.full((40,), 7.0)
            found = kernel.add(*inputs, torch.tensor(sound), exponents, layout, rule, CHUNK, out)
            assert found.tolist() == [wanted if sound[0] else [False, False], [False, False]]
            assert out.eq(7.0).all() == (any(wanted) or not all(sound))  # then nothing is written

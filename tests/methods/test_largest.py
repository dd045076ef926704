"""The largest elements against a sort in NumPy, compiled against plain torch, and what a sample can do wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.arithmetic.draws import key_of
from gradwire.arithmetic.shuffle import progression
from gradwire.codec.quota import Quota
from gradwire.layout import Layout
from gradwire.methods.topk.definition import select_largest
from gradwire.methods.topk.largest import EXPECTED, largest

SIZES = [33, 0, 1, 70_000, 31, 200_000]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))


def data(kind: str, seed: int) -> Tensor:
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return (flat * 2).round() / 2
    if kind == "sparse":
        return torch.where(flat > 2.2, flat, 0.0)
    return flat


def oracle(flat: Tensor, quota: Quota) -> tuple[list[int], list[float]]:
    """A stable sort of everything."""
    places, values = [], []
    for slot, count in zip(quota.layout, quota.counts, strict=True):
        own = slot.of(flat).numpy()
        taken = sorted(place for place in np.argsort(-np.abs(own), kind="stable")[:count].tolist() if own[place])
        places += [slot.offset + place for place in taken] + [slot.offset + slot.numel - 1] * (count - len(taken))
        values += [float(own[place]) for place in taken] + [0.0] * (count - len(taken))
    return places, values


@pytest.mark.parametrize("kind", ["normal", "ties", "sparse"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("choose", [select_largest, largest])
def test_exact_is_a_sort(choose: object, density: float, kind: str) -> None:
    flat, quota = data(kind, 1), Quota.of(LAYOUT, density)
    places, values = choose(flat, quota, 5, True, None)  # type: ignore[operator]
    assert (places.tolist(), values.tolist()) == oracle(flat, quota)


@pytest.mark.parametrize("kind", ["normal", "ties", "sparse"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_compiled_is_plain_torch(density: float, kind: str) -> None:
    quota, active = Quota.of(LAYOUT, density), torch.tensor([True, True, True, False, True, True])
    for step in range(3):
        for mask in (None, active):
            one, two = (choose(data(kind, step), quota, step, False, mask) for choose in (select_largest, largest))
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


def test_a_sample_finds_all_nearly_always() -> None:
    quota, short = Quota.of(LAYOUT, 0.01), 0
    for step in range(100):
        values = select_largest(data("normal", step), quota, step, False, None)[1]
        short += int((values == 0).any())
        assert int((values == 0).sum()) < 0.4 * quota.total
    assert short <= 4


def sampled(slot_number: int, quota: Quota, step: int) -> Tensor:
    """Flat places of a tensor's sample."""
    slot = LAYOUT.slots[slot_number]
    factor, start = progression(key_of(0, step, slot.name), slot.numel)
    return (
        factor * torch.arange(EXPECTED * slot.numel // quota.counts[slot_number]) + start
    ) % slot.numel + slot.offset


def test_a_sample_of_the_largest_alone_lets_few_pass() -> None:
    """Then these are sent, and the rest of the message is empty; exactly k if it is to be exact."""
    quota, flat = Quota.of(LAYOUT, 0.1), data("normal", 0)
    seen = sampled(5, quota, 8)
    flat[seen] = 100.0
    first = sum(quota.counts[:5])
    for choose in (select_largest, largest):
        places, values = choose(flat, quota, 8, False, None)
        assert values[first:].count_nonzero() == len(seen) < quota.counts[5]
        assert places[first : first + len(seen)].tolist() == sorted(seen.tolist())
        assert (places[first + len(seen) :] == LAYOUT.numel - 1).all()
        assert choose(flat, quota, 8, True, None)[1][first:].count_nonzero() == quota.counts[5]


def test_a_sample_of_nothing_lets_all_pass_and_the_largest_are_taken() -> None:
    quota, flat = Quota.of(LAYOUT, 0.1), data("normal", 0)
    flat[sampled(5, quota, 8)] = 0.0
    for choose in (select_largest, largest):
        places, values = choose(flat, quota, 8, False, None)
        assert (places.tolist(), values.tolist()) == oracle(flat, quota)

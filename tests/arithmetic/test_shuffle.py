"""Places drawn by a key: none twice, all alike, the same whatever bucket the tensor lies in."""

from __future__ import annotations

import pytest
import torch

from gradwire.arithmetic.shuffle import chosen, progression
from gradwire.codec.quota import Quota
from gradwire.layout import Layout

CPU = torch.device("cpu")


def places(numel: int, density: float, seed: int = 0, step: int = 0, name: str = "weight") -> list[int]:
    return chosen(seed, step, Quota.of(Layout.of([(name, (numel,))]), density), CPU)[0].tolist()


@pytest.mark.parametrize("numel", [1, 2, 31, 33, 64, 1000, 65537])
def test_all_of_a_tensor_is_a_permutation(numel: int) -> None:
    assert sorted(places(numel, 1.0)) == list(range(numel))


def test_the_very_places() -> None:
    """Another machine, device or version must draw these."""
    assert places(1000, 0.005) == [673, 39, 228, 254, 429]
    assert places(1 << 30, 5e-9, seed=7, step=9) == [887765990, 340034875, 982325362, 906929934, 433422529]


def test_seed_step_and_name_matter() -> None:
    drawn = [places(10_000, 0.01, *key) for key in ((0, 0), (1, 0), (0, 1), (0, 0, "bias"))]
    assert len({tuple(one) for one in drawn}) == 4


def test_buckets_do_not_matter() -> None:
    layout = Layout.of([("a", (100,)), ("empty", (0,)), ("b", (7, 9)), ("c", (1,))])
    together, tensor = chosen(3, 4, Quota.of(layout, 0.2), CPU)
    apart = [place + slot.offset for slot in layout if slot.numel for place in places(slot.numel, 0.2, 3, 4, slot.name)]
    assert together.tolist() == apart
    assert tensor.tolist() == [0] * 20 + [2] * 12 + [3]


def test_every_place_and_every_pair_is_as_likely() -> None:
    """5 of 20, 4000 times: counts within five standard deviations of a binomial one, and not all the same."""
    n, k, draws = 20, 5, 4000
    hits = torch.zeros(draws, n, dtype=torch.float64)
    for step in range(draws):
        hits[step, places(n, k / n, step=step)] = 1
    single, pairs = hits.sum(0), (hits.T @ hits)[torch.triu(torch.ones(n, n), 1) > 0]
    for counts, chance in ((single, k / n), (pairs, k * (k - 1) / n / (n - 1))):
        deviation = (draws * chance * (1 - chance)) ** 0.5
        assert float((counts - draws * chance).abs().max()) < 5 * deviation
        assert 0.6 * deviation < float(counts.std()) < 1.4 * deviation


@pytest.mark.parametrize("numel", [1, 2, 6, 30, 97])
def test_a_progression_meets_every_place(numel: int) -> None:
    for key in (0, 1, 12345, (1 << 64) - 1):
        factor, start = progression(key, numel)
        assert {(factor * i + start) % numel for i in range(numel)} == set(range(numel))

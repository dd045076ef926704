"""Random numbers by hashing: the same everywhere, and random as far as rounding and choosing can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.layout import Layout

CPU = torch.device("cpu")
LAYOUT = Layout.of([("weight", (300, 700)), ("scale", ()), ("nothing", (0,)), ("bias", (31,)), ("last", (65537,))])
N = 1 << 20
LONG = Layout.of([("weight", (N,))])


def oracle(seed: int, step: int, rank: int, name: str, index: int) -> int:
    """The docstring's equation in Python's own integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % (1 << 32)
        x ^= x >> 15
        x = x * 0x846CA68B % (1 << 32)
        return x ^ (x >> 16)

    key = draws.key_of(seed, step, name, rank)
    return mix((mix((index + key) % (1 << 32)) + (key >> 32)) % (1 << 32))


@pytest.mark.parametrize("make", [draws.bits, draws.reference_bits])
def test_every_draw_is_the_hash_of_its_place(make):
    layout = Layout.of([("first", (5, 7)), ("none", (0, 3)), ("scalar", ()), ("second", (33,))])
    expected = [oracle(-3, 12, 1, slot.name, i) for slot in layout for i in range(slot.numel)]
    drawn = make(-3, 12, layout, CPU, rank=1)
    assert drawn.dtype == torch.int32
    assert [x % (1 << 32) for x in drawn.tolist()] == expected


def test_these_draws_are_the_same_for_ever():
    """A run that goes on with another version rounds as it would have."""
    assert draws.key_of(0, 0, "weight") == 0xE4E196A41F2D9CFA
    assert draws.bits(0, 0, Layout.of([("weight", (4,))]), CPU).tolist() == [
        -751053408,
        1000941162,
        407267233,
        748409702,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("where", [LAYOUT, LONG, *LAYOUT], ids=lambda where: getattr(where, "name", "layout"))
def test_a_gpu_draws_the_same_bits(where):
    """By Triton and by plain torch; Triton's interpreter: test_triton_qsgd.py."""
    gpu, wanted = torch.device("cuda"), draws.bits(7, 3, where, CPU, rank=2)
    assert torch.equal(draws.bits(7, 3, where, gpu, rank=2).cpu(), wanted)
    if isinstance(where, Layout):
        assert torch.equal(draws.reference_bits(7, 3, where, gpu, rank=2).cpu(), wanted)


def test_buckets_do_not_matter():
    whole = draws.bits(1, 2, LAYOUT, CPU)
    for slot in LAYOUT:
        assert torch.equal(draws.bits(1, 2, slot, CPU), slot.of(whole))


def test_an_empty_bucket():
    assert draws.uniform(0, 0, Layout.of([]), CPU).shape == (0,)


def test_uniform_is_the_upper_bits():
    raw, numbers = draws.bits(0, 5, LONG, CPU), draws.uniform(0, 5, LONG, CPU)
    assert numbers.dtype == torch.float32
    assert torch.equal(numbers.double() * 2**24, ((raw.long() % (1 << 32)) >> 8).double())
    assert float(numbers.max()) < 1


OTHER = Layout.of([("other", (N,))])
PAIRS = {  # that must have nothing to do with each other
    "neighbours": lambda one: (one[:-1], one[1:]),
    "neighbours two apart": lambda one: (one[:-2], one[2:]),
    "rows of 1024": lambda one: (one[:-1024], one[1024:]),
    "steps": lambda one: (one, draws.uniform(0, 6, LONG, CPU)),
    "seeds": lambda one: (one, draws.uniform(1, 5, LONG, CPU)),
    "ranks": lambda one: (one, draws.uniform(0, 5, LONG, CPU, rank=1)),
    "tensors": lambda one: (one, draws.uniform(0, 5, OTHER, CPU)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_streams_are_independent(pair):
    """Correlation, and chi-square of the pairs over 16 x 16 fields; bounds of 5 standard deviations."""
    left, right = (part.double() for part in PAIRS[pair](draws.uniform(0, 5, LONG, CPU)))
    correlation = float(((left - 0.5) * (right - 0.5)).mean()) * 12
    assert abs(correlation) < 5 / N**0.5
    fields = torch.bincount((left * 16).long() * 16 + (right * 16).long(), minlength=256)
    assert_chi_square(fields, len(left))


@pytest.mark.parametrize("step", range(3))
def test_mean_variance_and_histogram(step):
    numbers = draws.uniform(0, step, LONG, CPU).double()
    assert abs(float(numbers.mean()) - 0.5) < 5 * (1 / 12 / N) ** 0.5
    assert abs(float(numbers.var()) - 1 / 12) < 5 * (1 / 180 / N) ** 0.5
    assert_chi_square(torch.bincount((numbers * 4096).long(), minlength=4096), N)
    fine = torch.bincount((numbers * 2**24).long() % 4096, minlength=4096)  # the lower twelve of the 24 bits
    assert_chi_square(fine, N)


def test_each_bit_is_a_fair_coin():
    raw = draws.bits(0, 9, LONG, CPU).numpy().view(np.uint32)
    for bit in range(32):
        heads = int((raw >> np.uint32(bit) & np.uint32(1)).sum())
        assert abs(heads - N / 2) < 5 * (N / 4) ** 0.5, bit


def assert_chi_square(counts: Tensor, total: int) -> None:
    """Neither too uneven nor too even: chi-square of k - 1 degrees has mean k - 1 and variance 2 (k - 1)."""
    expected, degrees = total / len(counts), len(counts) - 1
    statistic = float(((counts.double() - expected) ** 2).sum() / expected)
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5

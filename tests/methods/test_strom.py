"""Strom's threshold element by element against its definition, and what it takes from VGC's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire import Strom, from_spec
from gradwire.exchange.in_process import CPU, InProcess
from gradwire.layout import Layout
from gradwire.methods.base import powers, tensors

SIZES = [33, 1, 31, 64, 0, 700]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))
N = sum(SIZES)


def gradient(step: int) -> torch.Tensor:
    random = np.random.default_rng(step)
    return torch.tensor(random.normal(0, 1, N) * 10.0 ** random.uniform(-3, 0, N), dtype=torch.float32)


@pytest.mark.parametrize("wire", ["compact", "words"])
@pytest.mark.parametrize("tau", [0.25, 0.1, 0.03])
def test_every_element_of_many_steps_is_that_of_the_definition(tau: float, wire: str) -> None:
    ranks, r, threshold = InProcess(Strom(tau, wire), LAYOUT), np.zeros(N, np.float32), np.float32(tau)
    n_sent = 0
    for step in range(30):
        given = gradient(step)
        expected = np.zeros(N, np.float32)
        for i, g in enumerate(given.numpy()):
            r[i] += g
            if abs(r[i]) > threshold:
                expected[i] = threshold if r[i] > 0 else -threshold
                r[i] -= expected[i]
        done = ranks([given])
        assert done.mean.tolist() == expected.tolist()
        assert ranks.states[0].residual.tolist() == r.tolist()
        n_sent += np.count_nonzero(expected)
    assert 30 < n_sent < 30 * N * 0.9


def test_a_residual_of_tau_waits() -> None:
    ranks = InProcess(Strom(0.5), Layout.of([("one", (3,))]))
    assert ranks([torch.tensor([0.5, -0.5, 0.50001])]).mean.tolist() == [0, 0, 0.5]
    assert ranks([torch.tensor([0.25, -0.25, 0.0])]).mean.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("tau", [2.0**-62, 1e-18, 3e18, 2.0**62])
def test_the_smallest_and_the_largest_threshold(tau: float) -> None:
    """The kernels square r and tau: neither end is rounded to nothing or to infinity."""
    ranks = InProcess(Strom(tau), Layout.of([("one", (4,))]))
    given = torch.tensor([1.5 * tau, -1.5 * tau, 0.5 * tau, 3e38])
    assert ranks([given]).mean.tolist() == pytest.approx([tau, -tau, 0, tau])


def test_only_the_residual_is_state() -> None:
    state = Strom(0.1).init(LAYOUT, CPU)
    assert powers(state) == {"residual": 1}
    assert len(tensors(state)) == 1


@pytest.mark.parametrize("tau", [0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")])
def test_a_threshold_that_cannot_be(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must be a number in"):
        Strom(tau)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="wire must be one of compact, words, got 'bits'"):
        Strom(0.1, wire="bits")
    with pytest.raises(ValueError, match="strom has no default for tau: write strom:tau=value"):
        from_spec("strom")
    assert from_spec("strom:tau=0.1") == Strom(tau=0.1)

"""MomentumDCT against the transform's definition in float64: every element of some steps, its bytes, and wrong ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gradwire import MomentumDCT
from gradwire.errors import MessageError
from gradwire.exchange.in_process import CPU, InProcess
from gradwire.layout import Layout
from gradwire.methods.momentum_dct.cosine import tiles_of
from methods.test_contract import resealed
from methods.uneven import LAYOUT, N, gradient


def wave(u: int, n: int) -> np.ndarray:
    """The u-th cosine of n places, of length 1."""
    cosines = [math.cos(math.pi * (2 * x + 1) * u / (2 * n)) for x in range(n)]
    return np.array(cosines) * math.sqrt((1 if u == 0 else 2) / n)


def largest_part(tile: np.ndarray, k: int) -> np.ndarray:
    """The k largest components of one tile, with amplitudes of eight significant bits."""
    a, b = tile.shape
    waves = {(u, v): np.outer(wave(u, a), wave(v, b)) for u in range(a) for v in range(b)}
    amplitudes = {place: float((tile * one).sum()) for place, one in waves.items()}
    chosen = sorted(waves, key=lambda place: -abs(amplitudes[place]))[:k]
    return sum(float(torch.tensor(amplitudes[place]).bfloat16()) * waves[place] for place in chosen)


class Worker:
    """m, and one step of the method."""

    def __init__(self, chunk: int, k: int, momentum: float) -> None:
        self.m, self.chunk, self.k, self.momentum = np.zeros(N), chunk, k, momentum

    def step(self, g: np.ndarray) -> np.ndarray:
        self.m = self.momentum * self.m + g
        sent = np.zeros(N)
        for slot in LAYOUT:
            if not slot.numel:
                continue
            end, n_rows = slot.offset + slot.numel, slot.shape[0] if len(slot.shape) > 1 else 1
            matrix, out = (flat[slot.offset : end].reshape(n_rows, -1) for flat in (self.m, sent))
            pieces = [np.array_split(np.arange(n), -(-n // self.chunk)) for n in matrix.shape]
            for rows in pieces[0]:
                for columns in pieces[1]:
                    tile = np.ix_(rows, columns)
                    out[tile] = largest_part(matrix[tile], self.k)
        self.m = self.m - sent
        return sent


@pytest.mark.parametrize(("chunk", "k", "momentum"), [(8, 3, 0.999), (64, 5, 0.9), (5, 1, 1.0), (1, 2, 0.5)])
def test_every_element_of_some_steps_is_that_of_the_definition(chunk: int, k: int, momentum: float) -> None:
    """To what float32 rounds off in a transform."""
    ranks, worker = InProcess(MomentumDCT(chunk, k, momentum), LAYOUT), Worker(chunk, k, momentum)
    for step in range(4):
        expected = worker.step(gradient(step).numpy().astype(np.float64))
        done = ranks([gradient(step)])
        np.testing.assert_allclose(done.mean.numpy(), expected, rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(ranks.states[0].residual.numpy(), worker.m, rtol=1e-5, atol=3e-6)
        assert np.abs(expected).sum() > 1


def test_what_is_not_sent_stays_in_the_momentum() -> None:
    ranks = InProcess(MomentumDCT(chunk=8, k=2, momentum=0.9), LAYOUT)
    for step in range(5):
        before = ranks.states[0].residual.clone()
        done = ranks([gradient(step)])
        torch.testing.assert_close(
            done.mean + ranks.states[0].residual, 0.9 * before + gradient(step), rtol=1e-6, atol=1e-6
        )


def test_a_bad_step_leaves_the_momentum_with_the_gradient_in_it() -> None:
    ranks = InProcess(MomentumDCT(chunk=8, momentum=0.9), LAYOUT)
    ranks([gradient(0)])
    before, given = ranks.states[0].residual.clone(), gradient(1)
    given[3] = torch.nan
    done = ranks([given])
    assert not done.finite
    assert torch.equal(ranks.states[0].residual, before * 0.9 + torch.where(given.isnan(), 0.0, given))


def test_a_dense_step_sends_the_whole_momentum() -> None:
    ranks = InProcess(MomentumDCT(chunk=8, momentum=0.9), LAYOUT)
    ranks([gradient(0)])
    active = torch.tensor([True, False, True, True, True, False, True])
    live = LAYOUT.spread(active)
    before, given = ranks.states[0].residual.clone(), torch.where(live, gradient(1), 0.0)
    done = ranks([given], active=active, dense=True)
    assert torch.equal(done.mean, torch.where(live, before * 0.9 + given, 0.0))
    assert torch.equal(ranks.states[0].residual, torch.where(live, 0.0, before))


def test_the_mean_of_two_workers_and_its_sign() -> None:
    options = {"chunk": 8, "k": 3}
    both, signs = (InProcess(MomentumDCT(**options, sign=sign), LAYOUT, 2) for sign in (False, True))
    single = [InProcess(MomentumDCT(**options), LAYOUT) for _ in range(2)]
    for step in range(3):
        grads = [gradient(step, rank) for rank in range(2)]
        own = [ranks([grad]).mean for ranks, grad in zip(single, grads, strict=True)]
        mean = both(grads).mean
        torch.testing.assert_close(mean, (own[0] + own[1]) / 2, rtol=1e-5, atol=1e-6)
        assert torch.equal(signs(grads).mean, mean.sign())


def test_all_components_are_the_gradient_in_eight_bits() -> None:
    given = gradient(0)
    error = InProcess(MomentumDCT(chunk=8, k=64), LAYOUT)([given]).mean - given
    assert 1e-4 < float(error.norm() / given.norm()) < 2**-8


@pytest.mark.parametrize("shape", [(1,), (31,), (65, 1), (129, 33), (64, 64), (2, 63, 3)])
@pytest.mark.parametrize("chunk", [1, 2, 64, 128])
def test_the_transform_is_orthonormal_and_no_tile_is_longer(shape: tuple[int, ...], chunk: int) -> None:
    layout = Layout.of([("before", (3,)), ("one", shape)])
    tiles, flat = tiles_of(layout, chunk), torch.randn(layout.numel)
    coefficients = tiles.transform(flat)
    torch.testing.assert_close(coefficients.norm(), flat.norm())
    torch.testing.assert_close(tiles.inverse(coefficients, torch.empty_like(flat)), flat, rtol=1e-5, atol=1e-5)
    assert all(max(region.tile) <= chunk for region in tiles.regions)
    assert sum(group.count * group.size for group in tiles.groups) == layout.numel


def test_bytes_are_those_of_amplitude_and_place() -> None:
    layout = Layout.of([("weight", (1024, 1000)), ("bias", (1024,))])
    n_bits = 16 * 16 * 32 * (16 + 12) + 16 * 32 * (16 + 6)
    assert MomentumDCT(chunk=64, k=32).body_words(layout) == -(-n_bits // 32)
    assert n_bits / layout.numel < 0.25


@pytest.mark.parametrize("field", [63 << 16, 0x7FC0, 0x7F80, 0xFF80, 0x7200])
def test_places_and_amplitudes_that_cannot_be_are_refused(field: int) -> None:
    """Beyond the tile, not a number, infinite, larger than anybody sends."""
    layout = Layout.of([("one", (33,))])
    ranks = InProcess(MomentumDCT(chunk=33, k=1), layout)
    context = ranks.context()
    message = ranks.compressor.encode(torch.ones(33), torch.ones(33), ranks.states[0], context).data
    message[-1] = field
    resealed(message)
    with pytest.raises(MessageError, match="rank 0 does not hold what its method sends"):
        ranks.compressor.decode(message[None], torch.zeros(33), context)


def test_numbers_near_the_end_of_float32() -> None:
    """What is too large for one message waits; nothing that is not finite is made of it."""
    ranks = InProcess(MomentumDCT(chunk=8, k=3), LAYOUT)
    given = gradient(0)
    given[-40:] = 3e38
    for one in (given, gradient(1), gradient(2)):
        assert bool(torch.isfinite(ranks([one]).mean).all())
        assert bool(torch.isfinite(ranks.states[0].residual).all())


def test_sent_is_counted_in_components() -> None:
    compressor, context = MomentumDCT(chunk=8, k=3), InProcess(MomentumDCT(chunk=8), LAYOUT).context()
    message = compressor.encode(gradient(0), gradient(0), compressor.init(LAYOUT, CPU), context)
    assert message.sent is not None
    assert message.sent.tolist() == [5 * 3, 1, 1, 2 * 3, 0, 4 * 3, 12 * 3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk": 0}, "chunk must be a whole number in 1 .. 128, got 0"),
        ({"chunk": 129}, "chunk must be a whole number in 1 .. 128, got 129"),
        ({"k": 0}, "k must be a whole number in 1 .. 16384, got 0"),
        ({"k": 1.5}, "k must be a whole number"),
        ({"momentum": 0.0}, r"momentum must be in \(0, 1\], got 0.0"),
        ({"momentum": 1.1}, r"momentum must be in \(0, 1\], got 1.1"),
        ({"momentum": float("nan")}, "got nan"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MomentumDCT(**options)

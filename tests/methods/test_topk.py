"""TopK and Deep Gradient Compression, element by element against scalar NumPy, and wrong hyper-parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import TopK, from_spec
from gradwire.codec import reference
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context

SIZES = [33, 1, 31, 64, 0, 7, 500]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))
N = sum(SIZES)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"density": 0.1},
    "few": {"ratio": 1000},
    "all": {"density": 1.0},
    "momentum": {"density": 0.1, "momentum": 0.9},
    "clipped": {"density": 0.1, "clip": 0.5},
    "warm-up": {"density": 0.02, "warmup": 3},
    "deep gradient compression": {"density": 0.05, "momentum": 0.7, "clip": 1.0, "warmup": 2},
}


def gradient(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(N, generator=generator) * (0.1 + torch.rand(N, generator=generator))


class Worker:
    """By the paper, one element at a time, in float32."""

    def __init__(self, momentum: float = 0.0, clip: float | None = None, warmup: int = 0, **share: float) -> None:
        self.density = 1 / share["ratio"] if "ratio" in share else share["density"]
        self.momentum, self.clip, self.warmup = np.float32(momentum), clip, warmup
        self.u, self.r = np.zeros(N, np.float32), np.zeros(N, np.float32)

    def sends(self, grad: np.ndarray, step: int, n_workers: int) -> np.ndarray:
        sent = np.zeros(N, np.float32)
        density = self.density
        if step < self.warmup:
            density = 0.25 * (density / 0.25) ** (step / self.warmup)
        for slot in LAYOUT:
            here = range(slot.offset, slot.offset + slot.numel)
            g = grad[slot.offset : slot.offset + slot.numel]
            if self.clip is not None:
                norm = math.sqrt(sum(float(x) ** 2 for x in g))
                g = g * np.float32(min(1.0, self.clip / math.sqrt(n_workers) / norm)) if norm else g
            for i, x in zip(here, g, strict=True):
                self.u[i] = self.momentum * self.u[i] + x
                self.r[i] += self.u[i]
            count = max(1, math.floor(round(density * slot.numel, 6)))
            for i in sorted(here, key=lambda i: (-abs(self.r[i]), i))[:count]:
                sent[i], self.r[i], self.u[i] = self.r[i], 0, 0
        return sent


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("n_workers", [1, 2])
def test_every_element_of_several_steps(options: dict[str, Any], n_workers: int) -> None:
    ranks, workers = InProcess(TopK(**options), LAYOUT, n_workers), [Worker(**options) for _ in range(n_workers)]
    for step in range(6):
        grads = [gradient(step, rank) for rank in range(n_workers)]
        done = ranks(grads)
        sent = [one.sends(grad.numpy(), step, n_workers) for one, grad in zip(workers, grads, strict=True)]
        mean = sum(one * np.float32(1 / n_workers) for one in sent)
        assert done.mean.tolist() == mean.tolist(), step
        for state, worker in zip(ranks.states, workers, strict=True):
            assert state.residual.tolist() == worker.r.tolist(), step
            if options.get("momentum"):
                assert state.velocity.tolist() == worker.u.tolist(), step


def test_undo_gives_residual_and_velocity_back() -> None:
    ranks = InProcess(TopK(density=0.1, momentum=0.5), LAYOUT)
    ranks([gradient(0, 0)])
    before = [tensor.clone() for tensor in ranks.snapshot()[0]]
    done = ranks([gradient(1, 0)])
    done.undo[0]()
    velocity = before[1] * 0.5 + gradient(1, 0)
    assert torch.equal(ranks.states[0].velocity, velocity)
    assert torch.equal(ranks.states[0].residual, before[0] + velocity)


def test_a_tensor_without_a_gradient_keeps_its_velocity() -> None:
    ranks, idle = InProcess(TopK(density=0.1, momentum=0.5), LAYOUT), LAYOUT.slots[3]
    ranks([gradient(0, 0)])
    before = [idle.of(tensor).clone() for tensor in ranks.snapshot()[0]]
    active = torch.tensor([slot is not idle for slot in LAYOUT])
    for dense in (False, True):
        done = ranks([torch.where(LAYOUT.spread(active), gradient(1, 0), 0.0)], active=active, dense=dense)
        assert not idle.of(done.mean).any()
        state = ranks.states[0]
        assert torch.equal(idle.of(state.residual), before[0])
        assert torch.equal(idle.of(state.velocity), before[1])


def test_a_dense_step_sends_the_momentum_and_ends_it() -> None:
    ranks = InProcess(TopK(density=0.1, momentum=0.5), LAYOUT)
    ranks([gradient(0, 0)])
    residual, velocity = ranks.snapshot()[0]
    done = ranks([gradient(1, 0)], dense=True)
    assert torch.equal(done.mean, residual + (velocity * 0.5 + gradient(1, 0)))
    assert not ranks.states[0].velocity.any()


def test_density_falls_in_the_warm_up() -> None:
    method = TopK(density=0.25 / 16, warmup=4)
    assert [method.density_of(step) for step in range(6)] == [0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.015625]
    assert TopK(density=0.5, warmup=4).density_of(0) == 0.5
    ranks = InProcess(method, Layout.of([("weight", (40_000,))]))
    grad = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    lengths, counts = [], []
    for _ in range(6):
        done = ranks([grad])
        lengths.append(done.n_bytes)
        counts.append(int(done.mean.count_nonzero()))
    assert counts == [10_000, 5_000, 2_500, 1_250, 625, 625]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 4 * (method.body_words(ranks.layout) + 10)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_bytes_are_fewer_than_32_bits_a_place(density: float) -> None:
    """The public implementation sends 64 bits an element."""
    layout = Layout.of([("weight", (1000, 300)), ("bias", (300,)), ("scale", ())])
    count = sum(max(1, math.floor(density * slot.numel)) for slot in layout)
    assert TopK(density=density).body_words(layout) * 32 < 46 * count
    assert TopK(density=density).body_words(layout) > count


def damaged(message: Tensor, index: int, word: int) -> Tensor:
    changed = message.clone()
    changed[index] = word
    changed[8:10] = 0
    changed[8:10] = reference.checksum(changed)
    return changed[None]


def test_what_no_worker_sends_is_refused() -> None:
    """One tensor of 96 elements, 3 places: 5 low bits each, then a plane of 3 + 95 >> 5 bits."""
    layout, method = Layout.of([("weight", (96,))]), TopK(density=1 / 32)
    context = Context(layout, 0)
    grad = torch.zeros(96)
    grad[torch.tensor([1, 40, 95])] = torch.tensor([1.0, -2.0, 3.0])
    data = method.encode(grad, grad, method.init(layout, torch.device("cpu")), context).data
    assert data[10:].tolist()[3:] == [1 | 8 << 5 | 31 << 10, 0b10101]
    out = torch.empty(96)
    method.decode(data[None], out, context)
    assert torch.equal(out, grad)
    for index, word in ((10, 0x7FC00000), (12, 0x7F800000), (14, 0b11101), (14, 0b00101)):  # NaN, inf, 4 and 2 places
        with pytest.raises(MessageError, match="does not hold what its method sends"):
            method.decode(damaged(data, index, word), out, context)
    twice = damaged(data, 14, 0b01011)[0]  # the first two in the same block of 32 ..
    with pytest.raises(MessageError, match="does not hold what its method sends"):
        method.decode(damaged(twice, 13, 1 | 1 << 5 | 31 << 10), out, context)  # .. and at the same place


def test_ratio_is_another_way_to_say_density() -> None:
    assert TopK(ratio=1000) == TopK(density=0.001) == from_spec("topk:ratio=1000")
    assert TopK() == TopK(density=0.01) == from_spec("topk")
    assert from_spec("topk:density=0.001,momentum=0.9") == TopK(density=0.001, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"density": 0.1, "ratio": 10}, "give one of them"),
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, "density must be in"),
        ({"density": math.nan}, "density must be in"),
        ({"ratio": 0.5}, "ratio must be a finite number >= 1, got 0.5"),
        ({"ratio": math.inf}, "ratio must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"clip": 0.0}, "clip must be a finite number > 0, got 0.0"),
        ({"clip": math.inf}, "clip must be"),
        ({"warmup": -1}, "warmup must be >= 0 steps, got -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TopK(**options)

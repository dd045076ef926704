"""Local steps once more, slowly: numbers in lists, one after another. Nothing of the library is used but a draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Vector = list[float]
Tensors = dict[str, Vector]


def f32(x: float) -> float:
    """Rounded to float32."""
    return torch.tensor(x, dtype=torch.float32).item()


def all_of(e: Vector) -> Vector:
    """Dense: everything as it is."""
    return list(e)


def largest(share: float) -> Callable[[Vector], Vector]:
    """TopK: the k largest, the first of equals."""

    def compress(e: Vector) -> Vector:
        k = max(1, math.floor(share * len(e)))
        chosen = sorted(range(len(e)), key=lambda i: (-abs(e[i]), i))[:k]
        return [x if i in chosen else 0.0 for i, x in enumerate(e)]

    return compress


def powers_of_two(e: Vector) -> Vector:
    """Four bits, a sign and three of exponent, of everything: what VGC sends with a density of 1."""
    most = max(abs(x) for x in e)
    if most < 2.0**-126:
        return [0.0] * len(e)
    top = math.floor(math.log2(most))
    said = []
    for x in e:
        if abs(x) < 2.0**-126:
            said.append(0.0)
            continue
        size = math.floor(math.log2(abs(x)))
        size += abs(x) >= 1.5 * 2.0**size  # a tie goes up
        size = min(size, top)
        said.append(math.copysign(2.0**size, x) if top - size <= 7 else 0.0)
    return said


@dataclass
class Settings:
    """The options of local steps."""

    every: int
    outer_lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    decay: float = 0.95
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    keeps: bool = True  # whether what is not sent waits


@dataclass
class Worker:
    weights: Tensors
    e: Tensors
    sent_from: Tensors = field(default_factory=dict)


class Oracle:
    """W workers; `change(rank, step, name, size)` is what the inner optimizer adds to a tensor's weights."""

    def __init__(self, tensors: Tensors, parts: list[list[str]], workers: int, settings: Settings) -> None:
        self.base = {name: list(values) for name, values in tensors.items()}
        self.velocity = {name: [0.0] * len(values) for name, values in tensors.items()}
        self.parts, self.settings = parts, settings
        zeros = {name: [0.0] * len(values) for name, values in tensors.items()}
        self.workers = [
            Worker({n: list(v) for n, v in tensors.items()}, {n: list(v) for n, v in zeros.items()})
            for _ in range(workers)
        ]
        self.late: dict[int, tuple[int, Tensors]] = {}  # by fragment: when it is applied, and the mean
        self.told: list[Tensors] = []  # every mean that was made

    def run(
        self,
        steps: int,
        change: Callable[[int, int, str, int], Vector],
        compress: Callable[[Vector], Vector],
    ) -> None:
        s = self.settings
        for step in range(1, steps + 1):
            for rank, worker in enumerate(self.workers):
                for name, values in worker.weights.items():
                    pairs = zip(values, change(rank, step, name, len(values)), strict=True)
                    worker.weights[name] = [f32(a + b) for a, b in pairs]
            for part in list(self.late):
                if self.late[part][0] == step:
                    self.apply(part, self.late.pop(part)[1])
            for part in range(s.fragments):
                if step % s.every == math.ceil((part + 1) * s.every / s.fragments) % s.every:
                    mean = self.exchange(part, compress)
                    if s.delay:
                        self.late[part] = (step + s.delay, mean)
                    else:
                        self.apply(part, mean)

    def exchange(self, part: int, compress: Callable[[Vector], Vector]) -> Tensors:
        mean: Tensors = {}
        for name in self.parts[part]:
            total = [0.0] * len(self.base[name])
            for worker in self.workers:
                delta = [b - w for b, w in zip(self.base[name], worker.weights[name], strict=True)]
                held = worker.e[name] if self.settings.keeps else [0.0] * len(delta)
                e = [f32(self.settings.decay * old + d) for old, d in zip(held, delta, strict=True)]
                said = compress(e)
                worker.e[name] = [f32(a - b) for a, b in zip(e, said, strict=True)] if self.settings.keeps else held
                worker.sent_from[name] = list(worker.weights[name])
                total = [t + x / len(self.workers) for t, x in zip(total, said, strict=True)]
            mean[name] = total
        self.told.append(mean)
        return mean

    def apply(self, part: int, mean: Tensors) -> None:
        s = self.settings
        for name in self.parts[part]:
            for i, u in enumerate(mean[name]):
                self.velocity[name][i] = s.momentum * self.velocity[name][i] + u
                step = u + s.momentum * self.velocity[name][i] if s.nesterov else self.velocity[name][i]
                self.base[name][i] = f32(self.base[name][i] - s.outer_lr * step)
            for worker in self.workers:
                for i, b in enumerate(self.base[name]):
                    now = worker.weights[name][i]
                    if s.delay == 0:
                        worker.weights[name][i] = b
                    elif s.mixing is None:
                        worker.weights[name][i] = f32(b + (now - worker.sent_from[name][i]))
                    else:
                        worker.weights[name][i] = f32(s.mixing * now + (1 - s.mixing) * b)

"""Local steps once more, slowly: numbers in lists, one after another. Nothing of the library is used but a draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Vector = list[float]
Tensors = dict[str, Vector]
Compress = Callable[[list[Vector], str, int], list[Vector]]  # what all workers hold, whose it is, which round of it


def f32(x: float) -> float:
    """Rounded to float32."""
    return torch.tensor(x, dtype=torch.float32).item()


def alone(compress: Callable[[Vector], Vector]) -> Compress:
    """Each worker by itself, and by what it holds alone."""
    return lambda held, name, number: [compress(e) for e in held]


@alone
def all_of(e: Vector) -> Vector:
    """Dense: everything as it is."""
    return list(e)


def places_of_largest(e: Vector, k: int) -> list[int]:
    """The first of equals."""
    return sorted(range(len(e)), key=lambda i: (-abs(e[i]), i))[:k]


def largest(share: float) -> Compress:
    """TopK."""

    def compress(e: Vector) -> Vector:
        chosen = places_of_largest(e, max(1, math.floor(share * len(e))))
        return [x if i in chosen else 0.0 for i, x in enumerate(e)]

    return alone(compress)


@alone
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


def three_bits(x: float) -> float:
    """The nearest number with three bits behind the leading one; 0 < x <= 1."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.floor(16 * mantissa + 0.5) / 16, exponent)


def by_chunks(chunk: int, k: int) -> Compress:
    """ChunkTopK with two bits: of every chunk the k largest, as a sign and one of two sizes times the chunk's scale."""

    def compress(e: Vector) -> Vector:
        chunks = [range(begin, min(begin + chunk, len(e))) for begin in range(0, len(e), chunk)]
        chosen = []
        for where in chunks:
            within = places_of_largest([e[i] for i in where], max(1, k * len(where) // chunk))
            chosen.append([where[i] for i in within])
        means = [sum(abs(e[i]) for i in places) / len(places) for places in chosen]
        scales = [three_bits(mean / max(means)) for mean in means]
        scaled = [(i, scale) for places, scale in zip(chosen, scales, strict=True) for i in places]
        sent = [(i, scale, abs(e[i]) > 1.1 * max(means) * scale) for i, scale in scaled]
        sizes = {}
        for level in {level for *_, level in sent}:
            own = [(i, scale) for i, scale, its in sent if its == level]
            sizes[level] = sum(abs(e[i]) for i, _ in own) / sum(scale for _, scale in own)
        said = [0.0] * len(e)
        for i, scale, level in sent:
            said[i] = math.copysign(sizes[level] * scale, e[i])
        return said

    return alone(compress)


def drawn(places: Callable[[str, int], list[int]]) -> Compress:
    """RandomK: the same places of all workers."""

    def compress(held: list[Vector], name: str, number: int) -> list[Vector]:
        chosen = places(name, number)
        return [[x if i in chosen else 0.0 for i, x in enumerate(e)] for e in held]

    return compress


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def thin(shapes: dict[str, tuple[int, int]], basis: dict[str, list[Vector]]) -> Compress:
    """PowerSGD: of every matrix the mean's part P Q, which all workers say; other tensors whole.

    shapes: of the matrices that go as two thin ones; basis: where each begins to look, [rank, columns].
    """
    latest: dict[str, list[Vector]] = {}

    def compress(held: list[Vector], name: str, number: int) -> list[Vector]:
        if name not in shapes:
            return [list(e) for e in held]
        rows, columns = shapes[name]
        mean = [sum(values) / len(held) for values in zip(*held, strict=True)]
        matrix = [mean[columns * i : columns * (i + 1)] for i in range(rows)]
        left: list[Vector] = []
        for q in latest[name] if number else basis[name]:
            p = [dot(row, q) for row in matrix]
            for other in left:
                share = dot(p, other)
                p = [x - share * y for x, y in zip(p, other, strict=True)]
            left.append([x / math.sqrt(dot(p, p)) for x in p])
        right = [[dot(p, column) for column in zip(*matrix, strict=True)] for p in left]  # type: ignore[arg-type]
        latest[name] = [[x / max(map(abs, q)) for x in q] for q in right]
        pairs = list(zip(left, right, strict=True))
        said = [sum(p[i] * q[j] for p, q in pairs) for i in range(rows) for j in range(columns)]
        return [said] * len(held)

    return compress


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
        compress: Compress,
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

    def exchange(self, part: int, compress: Compress) -> Tensors:
        number, mean = len(self.told) // len(self.parts), {}
        for name in self.parts[part]:
            for worker in self.workers:
                delta = [b - w for b, w in zip(self.base[name], worker.weights[name], strict=True)]
                held = worker.e[name] if self.settings.keeps else [0.0] * len(delta)
                worker.e[name] = [f32(self.settings.decay * old + d) for old, d in zip(held, delta, strict=True)]
                worker.sent_from[name] = list(worker.weights[name])
            said = compress([worker.e[name] for worker in self.workers], name, number)
            for worker, own in zip(self.workers, said, strict=True):
                worker.e[name] = [f32(a - b) for a, b in zip(worker.e[name], own, strict=True)]
            mean[name] = [sum(values) / len(self.workers) for values in zip(*said, strict=True)]
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

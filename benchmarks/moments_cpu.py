"""Exact second moments on a CPU: a model's forward and backward with them, against plain ones and other libraries.

    python benchmarks/moments_cpu.py [threads]

Each contender and gradwire run in turn in one loop of their own (per-sample gradients of the one would push the other
out of the caches), and the median of each is taken. BackPACK and Opacus are compared where they are installed,
`pip install backpack-for-pytorch opacus`. A row: what was timed, against what, both
times, their ratio, and the bar it has to keep.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments import Recorder

Step = Callable[[], None]
Row = dict[str, Any]
ROUNDS = 9
WARM = 3


class Block(nn.Module):
    """An encoder layer of Linears alone: no other library knows nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        apart = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(-2, -3) for part in apart.unbind(-3))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2)
        x = x + self.out(mixed)
        wide = F.gelu(self.widen(self.between(x)))
        narrowed: Tensor = x + self.narrow(wide)
        return narrowed


def transformer() -> nn.Module:
    """528 k parameters: two layers of width 128 between an embedding and a head of 512 words."""
    return nn.Sequential(nn.Embedding(512, 128), Block(128, 4), Block(128, 4), nn.Linear(128, 512))


def mlp() -> nn.Module:
    """670 k parameters."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    """132 k parameters."""
    layers: list[nn.Module] = []
    for channels, outputs, pool in ((3, 32, False), (32, 32, True), (32, 64, False), (64, 64, True)):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Task:
    """One model with a batch; bar: what exact moments may cost."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    bar: float

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


def tasks() -> list[Task]:
    words = torch.randint(0, 512, (2, 32, 64))
    return [
        Task("MLP 670k, B 128", mlp, torch.randn(128, 784), torch.randint(0, 10, (128,)), 1.25),
        Task("CNN 132k, B 64", cnn, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)), 1.20),
        Task("Transformer 528k, B 32, T 64", transformer, words[0], words[1], 1.10),
    ]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def plain(task: Task) -> Step:
    model = task.model()

    def step() -> None:
        model.zero_grad()
        loss_of(model(task.x), task.y).backward()

    return step


def gradwire(task: Task) -> Step:
    model = task.model()
    recorder = Recorder(model, dict(model.named_parameters()), strict=True)

    def step() -> None:
        model.zero_grad()
        loss_of(model(task.x), task.y).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            recorder.consume(name, param.grad.reshape(-1))

    return step


def vmap(task: Task) -> Step:
    model = task.model()
    values = {name: param.detach() for name, param in model.named_parameters()}

    def sample_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, values, (x[None],)), y[None]) / len(task.x)

    each = torch.func.vmap(torch.func.grad(sample_loss), (None, 0, 0))

    def step() -> None:
        for gradients in each(values, task.x, task.y).values():
            gradients.sum(0), gradients.square_().sum(0)

    return step


def backpack(task: Task) -> Step:
    from backpack import backpack as recording
    from backpack import extend
    from backpack.extensions import SumGradSquared

    model, loss = extend(task.model()), extend(nn.CrossEntropyLoss())

    def step() -> None:
        model.zero_grad()
        logits = model(task.x)
        with recording(SumGradSquared()):
            loss(logits.flatten(0, -2), task.y.flatten()).backward()

    return step


def opacus(task: Task) -> Step:
    from opacus import GradSampleModule

    model = GradSampleModule(task.model(), loss_reduction="mean")

    def step() -> None:
        model.zero_grad()
        loss_of(model(task.x), task.y).backward()
        for param in model.parameters():
            param.grad_sample.square().sum(0)
            param.grad_sample = None

    return step


CONTENDERS: dict[str, tuple[str | None, Callable[[Task], Step]]] = {
    "plain": (None, plain),
    "vmap(grad) + reduce": (None, vmap),
    "BackPACK SumGradSquared": ("backpack", backpack),
    "Opacus + reduce": ("opacus", opacus),
}


def contender(name: str, task: Task) -> Step | None:
    """None where it is not installed or cannot do this model, which is said."""
    library, make = CONTENDERS[name]
    if library is not None and find_spec(library) is None:
        print(f"{library} is not installed and was left out", file=sys.stderr)
        return None
    try:
        step = make(task)
        step()
        return step
    except Exception as error:
        print(f"{name} cannot do {task.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return None


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turn."""
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn >= WARM:
                times_ms[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(times) for name, times in times_ms.items()}


def rows(threads: int = 1, rounds: int = ROUNDS) -> list[Row]:
    """Against plain: at most the bar. Against another library: at most 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        return [row for task in tasks() for row in rows_of(task, threads, rounds)]
    finally:
        torch.set_num_threads(before)


def rows_of(task: Task, threads: int, rounds: int) -> list[Row]:
    """One model against every contender that can do it."""
    found: list[Row] = []
    for name in CONTENDERS:
        other = contender(name, task)
        if other is None:
            continue
        turns = 3 * rounds if name == "plain" else rounds
        times_ms = medians({"other": other, "ours": gradwire(task)}, turns)
        ratio, bar = times_ms["ours"] / times_ms["other"], task.bar if name == "plain" else 1.0
        row = {"what": f"{task.name}, {threads} thread{'s' * (threads > 1)}", "against": name}
        row |= {"time_ms": times_ms["ours"], "reference_ms": times_ms["other"], "ratio": ratio}
        found.append({**row, "bar": bar, "holds": ratio <= bar})
    return found

"""Exact second moments by gradwire and by the other tools that make them: one function each, over the same models.

`make(task, model)` returns a step: forward, backward, gradient in `.grad` and the moments. BackPACK and Opacus are
compared where they are installed: `make bench` has an environment of its own for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments import Recorder
from gradwire.moments.cuda_graphs.graphed_forward import GraphedForward

Step = Callable[[], None]


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


def transformer(words: int = 512, width: int = 128, depth: int = 2, heads: int = 4) -> nn.Module:
    """Layers between an embedding and a head; 528 k parameters by default."""
    blocks = (Block(width, heads) for _ in range(depth))
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))


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
    """One model with a batch, on the batch's device; bar: what exact moments may cost beside the plain step."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    bar: float | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(self.x.device)


def tasks(device: str = "cpu") -> list[Task]:
    words = torch.randint(0, 512, (2, 32, 64), device=device)
    classes = torch.randint(0, 10, (128,), device=device)
    vectors, images = torch.randn(128, 784, device=device), torch.randn(64, 3, 32, 32, device=device)
    return [
        Task("MLP 670k, B 128", mlp, vectors, classes, 1.25),
        Task("CNN 132k, B 64", cnn, images, classes[:64], 1.20),
        Task("Transformer 528k, B 32, T 64", transformer, words[0], words[1], 1.10),
    ]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def plain(task: Task, model: nn.Module) -> Step:
    def step() -> None:
        model.zero_grad()
        loss_of(model(task.x), task.y).backward()

    return step


def gradwire(task: Task, model: nn.Module) -> Step:
    return recorded(task, model, Recorder(model, dict(model.named_parameters()), strict=True))


def captured(task: Task, model: nn.Module) -> Step:
    """gradwire, forward and backward as CUDA graphs; the other tools live on hooks that no graph replays."""
    recorder = Recorder(model, dict(model.named_parameters()), strict=True)
    GraphedForward(recorder, model, (task.x,))
    return recorded(task, model, recorder)


def recorded(task: Task, model: nn.Module, recorder: Recorder) -> Step:
    def step() -> None:
        model.zero_grad()
        loss_of(model(task.x), task.y).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            recorder.consume(name, param.grad.reshape(-1))

    return step


def vmap(task: Task, model: nn.Module) -> Step:
    values = {name: param.detach() for name, param in model.named_parameters()}

    def sample_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, values, (x[None],)), y[None]) / len(task.x)

    each = torch.func.vmap(torch.func.grad(sample_loss), (None, 0, 0), randomness="different")

    def step() -> None:
        for name, gradients in each(values, task.x, task.y).items():
            model.get_parameter(name).grad = gradients.sum(0)
            gradients.square_().sum(0)

    return step


def backpack(task: Task, model: nn.Module) -> Step:
    from backpack import backpack as recording
    from backpack import extend
    from backpack.extensions import SumGradSquared

    model, loss = extend(model), extend(nn.CrossEntropyLoss())

    def step() -> None:
        model.zero_grad()
        logits = model(task.x)
        with recording(SumGradSquared()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the layers it leaves out, at every step
            loss(logits.flatten(0, -2), task.y.flatten()).backward()

    return step


def opacus(task: Task, model: nn.Module) -> Step:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="mean")

    def step() -> None:
        wrapped.zero_grad()
        loss_of(wrapped(task.x), task.y).backward()
        for param in wrapped.parameters():
            param.grad_sample.square().sum(0)
            param.grad_sample = None

    return step


PEERS: dict[str, tuple[str | None, Callable[[Task, nn.Module], Step]]] = {
    "vmap(grad) + reduce": (None, vmap),
    "BackPACK SumGradSquared": ("backpack", backpack),
    "Opacus + reduce": ("opacus", opacus),
}


def installed(name: str) -> bool:
    library, _ = PEERS[name]
    return library is None or find_spec(library) is not None

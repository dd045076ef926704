"""Gradients of a real model that every method is given alike: the 2.63 M-parameter MLP on scikit-learn's digits.

A backward through `Given` costs one copy of the gradient and nothing else, so a step's time is that of its exchange.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.tools.train.digits import open_digits

WIDTH = 1024
INPUTS = 512  # mixed from the 64 pixels
N_PARAMETERS = 2_634_762
BATCH = 64
TRAINED, KEPT = 20, 20  # steps before the first gradient that is kept, and how many are
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Sample:
    """One step of one worker: its batch, and the gradient that the model makes of it."""

    inputs: Tensor
    targets: Tensor
    grads: list[Tensor]


@dataclass(frozen=True)
class Scene:
    """A model in the middle of its training, and the next steps of a worker, all at the same weights."""

    model: nn.Module
    samples: list[Sample]


def mlp() -> nn.Module:
    """N_PARAMETERS in 8 tensors."""
    sizes = (INPUTS, WIDTH, WIDTH, WIDTH)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def scene(rank: int) -> Scene:
    """The same model on every rank, on samples of the rank's own."""
    digits = open_digits(None)
    torch.manual_seed(0)
    model, mix = mlp(), torch.randn(64, INPUTS) / 8
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    samples: list[Sample] = []
    for step in range(TRAINED + KEPT):
        kept = step >= TRAINED
        indices = torch.randint(digits.samples, (BATCH,), generator=own if kept else same)
        pixels, targets = digits.batch(indices)
        inputs = pixels @ mix
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if kept:
            samples.append(Sample(inputs, targets, [p.grad.clone() for p in model.parameters()]))
        else:
            optimizer.step()
    return Scene(model, samples)


class Give(torch.autograd.Function):
    """A loss of 0 whose gradient is what it was told."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grads


class Given(nn.Module):
    """The MLP's parameters without its layers: the gradient is given."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        for name, parameter in scene.model.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

    def arguments(self, sample: Sample) -> tuple[Any, ...]:
        return (sample.grads,)

    def forward(self, grads: list[Tensor]) -> Tensor:
        loss: Tensor = Give.apply(grads, *self.parameters())
        return loss


class Computed(nn.Module):
    """The MLP itself, for methods that look at the samples."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.net = copy.deepcopy(scene.model)

    def arguments(self, sample: Sample) -> tuple[Any, ...]:
        return sample.inputs, sample.targets

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(inputs), targets)

"""Whole training steps on a GPU with exact second moments against the plain step; peak memory; BackPACK and Opacus."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, ResNet50, cifar_vgg
from gradwire.moments import Recorder
from gradwire.moments.cuda_graphs.graphed_forward import GraphedForward

ROUNDS, WARM_UP = 30, 8


@dataclass
class Task:
    """A model, a batch of it, and the bar for its step."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    bar: float
    channels_last: bool = False
    autocast: bool = True
    graph: bool = False  # also as CUDA graphs


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 50257, (16, 1025), device="cuda")
    return ids[:, :-1], ids[:, 1:].flatten()


def images(size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 3, size, size, device="cuda"), torch.randint(0, classes, (64,), device="cuda")


TASKS = (
    Task("GPT-2 124M, B 16, T 1024, bf16 autocast, fused AdamW", GPT, tokens, 1.08, graph=True),
    Task("ResNet-50, B 64, 224 px, channels_last, bf16", ResNet50, lambda: images(224, 1000), 1.20, True, graph=True),
    Task("CIFAR VGG, B 64, bf16", cifar_vgg, lambda: images(32, 10), 1.25, channels_last=True, graph=True),
    Task("CIFAR VGG, B 64, float32 (tf32)", cifar_vgg, lambda: images(32, 10), 1.25, autocast=False, graph=True),
)


class Step:
    """One training step of a model, plain or with moments."""

    def __init__(self, task: Task, model: nn.Module, moments: bool) -> None:
        self.task, self.model = task, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.recorder = Recorder(model, names, strict=True) if moments else None

    def _precision(self, cache: bool = True) -> AbstractContextManager[object]:
        enabled = self.task.autocast
        return torch.autocast("cuda", torch.bfloat16, enabled, cache_enabled=cache) if enabled else nullcontext()

    def capture(self, x: Tensor) -> None:
        """Forward and backward as CUDA graphs from now on."""
        with self._precision(cache=False):
            if self.recorder is None:
                torch.cuda.make_graphed_callables(self.model, (x,))
            else:
                GraphedForward(self.recorder, self.model, (x,))

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with self._precision():
            output = self.model(x)
        F.cross_entropy(output.flatten(0, -2).float(), y).backward()
        if self.recorder is not None:
            for name, account in self.recorder.accounts.items():
                self.recorder.consume(name, account.param.grad.flatten() if account.reason else account.moment)
        self.optimizer.step()


def time_ms(step: Step, x: Tensor, y: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(x, y)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def rows() -> Iterator[dict[str, Any]]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    for task in TASKS:
        torch.manual_seed(0)
        model = task.make().cuda()
        if task.channels_last:
            model = model.to(memory_format=torch.channels_last)
        x, y = task.batch()
        if task.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        plain, exact = Step(task, copy.deepcopy(model), moments=False), Step(task, model, moments=True)
        row = compared(task, plain, exact, x, y)
        yield row | {"what": f"training step with exact moments, {task.name}", "against": "plain step"}
        yield from memory(task, plain, exact, x, y)
        if task.graph:
            plain.capture(x), exact.capture(x)
            row = compared(task, plain, exact, x, y)
            what = f"training step with exact moments as CUDA graphs (wire.capture), {task.name}"
            yield row | {"what": what, "against": "plain step as CUDA graphs"}


def compared(task: Task, plain: Step, exact: Step, x: Tensor, y: Tensor) -> dict[str, Any]:
    for _ in range(WARM_UP):
        plain(x, y), exact(x, y)
    times = [(time_ms(exact, x, y), time_ms(plain, x, y)) for _ in range(ROUNDS)]
    measured, reference = (median(column) for column in zip(*times, strict=True))
    ratio = measured / reference
    return {
        "time_ms": measured,
        "reference_ms": reference,
        "ratio": ratio,
        "bar": task.bar,
        "holds": ratio <= task.bar,
    }


def memory(task: Task, plain: Step, exact: Step, x: Tensor, y: Tensor) -> Iterator[dict[str, Any]]:
    """Peak memory above the plain step: the moments are 4 bytes a parameter, the rest is what they need on the way."""
    peaks = []
    for step in (exact, plain):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(x, y)
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    n_moments = sum(p.numel() for p in exact.model.parameters()) * 4 / 2**20
    yield {
        "what": f"peak memory of that step, {n_moments:.0f} MiB of moments included, {task.name}",
        "against": "plain step",
        "value": peaks[0],
        "reference": peaks[1],
        "unit": "MiB",
    }

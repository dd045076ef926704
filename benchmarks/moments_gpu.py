"""Exact second moments on a GPU beside the tools that make them too: time and peak memory of whole training steps.

Every step is forward, backward, moments and fused AdamW on a model of its own, in float32 with tf32 allowed. A tool and
gradwire take turns; a tool that refuses a model is a row that says why.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.models import cifar_vgg
from benchmarks.peers import PEERS, Step, Task, captured, gradwire, installed, plain, tasks, transformer

Row = dict[str, Any]
Make = Callable[[Task, nn.Module], Step]
ROUNDS, WARM_UP = 12, 3
WORDS = 4096


def without_batch_norm() -> nn.Module:
    return nn.Sequential(*(layer for layer in cifar_vgg() if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)))


def larger(device: str) -> list[Task]:
    """23 and 15 M parameters: sizes at which the products weigh more than their launches."""
    words = torch.randint(0, WORDS, (2, 32, 128), device=device)
    images, classes = torch.randn(64, 3, 32, 32, device=device), torch.randint(0, 10, (64,), device=device)
    deep = partial(transformer, words=WORDS, width=512, depth=6, heads=8)
    return [
        Task("Transformer 23M, B 32, T 128", deep, words[0], words[1]),
        Task("CIFAR VGG 15M without batch norm, B 64", without_batch_norm, images, classes),
        Task("CIFAR VGG 15M, B 64", cifar_vgg, images, classes),
    ]


def trained(task: Task, make: Make) -> tuple[Step, nn.Module]:
    """The whole training step of a model of its own."""
    model = task.model()
    step = make(task, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def whole() -> None:
        step()
        optimizer.step()

    return whole, model


def medians(steps: Sequence[Step], rounds: int, synchronize: Callable[[], object]) -> list[float]:
    """Milliseconds of each, taken in turn, from an idle device to an idle device."""
    times_ms: list[list[float]] = [[] for _ in steps]
    for turn in range(WARM_UP + rounds):
        for step, times in zip(steps, times_ms, strict=True):
            synchronize()
            begin = time.perf_counter()
            step()
            synchronize()
            if turn >= WARM_UP:
                times.append((time.perf_counter() - begin) * 1e3)
    return [median(times) for times in times_ms]


def peak_mib(task: Task, make: Make) -> float:
    """The highest of a step, weights and optimizer included, the batch not."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    step, _ = trained(task, make)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def left_out(name: str, model: nn.Module) -> str:
    """BackPACK passes over layers it has no formula for, with a warning."""
    missing = [p for p in model.parameters() if not hasattr(p, "sum_grad_squared")]
    return f" (leaves {len(missing)} tensors out)" if name.startswith("BackPACK") and missing else ""


def rows(device: str = "cuda", rounds: int = ROUNDS) -> Iterator[Row]:
    """Less than every peer's, in time and in memory; plain is there to compare with."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(1)
    ways = {"": gradwire, " as CUDA graphs (wire.capture)": captured} if device == "cuda" else {"": gradwire}
    for task in (*tasks(device), *larger(device)):
        ours = {way: trained(task, make)[0] for way, make in ways.items()}
        peak = peak_mib(task, gradwire) if device == "cuda" else None
        for name in ("plain", *PEERS):
            yield from rows_of(task, name, ours, peak, rounds)


def rows_of(task: Task, name: str, ours: dict[str, Step], peak: float | None, rounds: int) -> Iterator[Row]:
    """Time of ours, in each way, and memory, against one other."""
    make = plain if name == "plain" else PEERS[name][1]
    of = f"{task.name}, float32 (tf32)"
    try:
        if name != "plain" and not installed(name):
            raise ImportError("it is not installed")
        theirs, model = trained(task, make)
        theirs()
    except Exception as error:
        yield {"what": f"training step with exact moments, {of}", "against": f"{name} cannot ({type(error).__name__})"}
        return
    synchronize = torch.cuda.synchronize if task.x.is_cuda else lambda: None
    *times_ms, reference = medians((*ours.values(), theirs), rounds, synchronize)
    about = {"against": name + left_out(name, model), "bar": None if name == "plain" else 1.0}
    for way, time_ms in zip(ours, times_ms, strict=True):
        row = {"what": f"training step with exact moments{way}, {of}", "time_ms": time_ms, "reference_ms": reference}
        yield {**row, **about, "holds": time_ms <= reference}
    if peak is not None:
        del theirs, model
        reference = peak_mib(task, make)
        row = {"what": f"peak memory of that step, {of}", "value": peak, "reference": reference, "unit": "MiB"}
        yield {**row, **about, "holds": peak <= reference}

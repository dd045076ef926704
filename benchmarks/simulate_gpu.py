"""A step of eight virtual workers on one GPU: the CIFAR VGG, 64 images each, optimizer and all.

The gradients are of real steps on noise, at a learning rate that keeps the model where it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradwire
from benchmarks.models import cifar_vgg
from gradwire.methods import from_spec

Row = dict[str, Any]
WORKERS, BATCH = 8, 64
WARM, STEPS, ROUNDS = 12, 20, 5  # the counts that messages follow have settled by then
BAR_MS = 10.0
ONE_BY_ONE = "workers one after another, layer by layer, every message written and read"
METHODS = (
    ("vgc:alpha=1.5", "bf16"),
    ("vgc:alpha=1.5", "float32 (tf32)"),
    ("vgc:alpha=2,tau=0.1", "bf16"),
    ("vgc:alpha=0.5,density=0.004", "bf16"),
    ("strom:tau=0.1", "bf16"),
    ("dense", "bf16"),
    ("qsgd:bits=4,group=512", "bf16"),
    ("topk:density=0.004,exact=true", "bf16"),
    ("powersgd:rank=2", "bf16"),
    ("momentum_dct", "bf16"),
)


class Training:
    """One method's model, workers and optimizer."""

    def __init__(self, spec: str, precision: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.lowered = precision == "bf16"
        model = cifar_vgg().cuda().to(memory_format=torch.channels_last)
        self.simulation = gradwire.simulate(model, from_spec(spec), self.loss, workers=WORKERS, **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4, fused=True)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.lowered):
            outputs = model(x)
        return F.cross_entropy(outputs.float(), y)

    def run(self, steps: int) -> float:
        """Milliseconds a step."""
        inputs = torch.rand(steps, WORKERS, BATCH, 3, 32, 32, device="cuda")
        targets = torch.randint(0, 10, (steps, WORKERS, BATCH), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for x, y in zip(inputs, targets, strict=True):
            self.simulation.backward(x, y)
            self.optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    def timed(self) -> float:
        self.run(WARM)
        return statistics.median(self.run(STEPS) for _ in range(ROUNDS))


def rows() -> Iterator[Row]:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    what = f"a step of {WORKERS} virtual workers x {BATCH}, CIFAR VGG"
    naive = Training("vgc:alpha=1.5", "bf16", capture=False, messages=True)
    naive.run(3)
    slow = naive.run(5)
    for spec, precision in METHODS:
        found = Training(spec, precision).timed()
        name = f"{what}, {spec}, {precision}"
        bar = {"bar": 1.0, "holds": found <= BAR_MS} if (spec, precision) == METHODS[0] else {}
        yield {"what": name, "against": "the bar", "time_ms": found, "reference_ms": BAR_MS} | bar
        if (spec, precision) == METHODS[0]:
            yield {"what": name, "against": ONE_BY_ONE, "time_ms": found, "reference_ms": slow}

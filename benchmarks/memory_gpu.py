"""GPU memory that VGC takes beyond plain DDP: the bar is 12 bytes a parameter and (W + 1) messages.

GPT-2 124M under DistributedDataParallel, first plain, then attached, in the same processes: what stays allocated
between two steps, and the highest of a whole step. With few activations everything that VGC needs on its way shows in
the peak; with many it hides behind them. A message: the bytes that one worker sends in a step, all buckets together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gradwire
from benchmarks.models import GPT
from benchmarks.ranks import on_ranks

Row = dict[str, Any]
Batch = tuple[int, int]  # samples, positions
FEW, MANY = (16, 16), (16, 1024)
SETTLE = 100  # steps: every element passes its first looks too easily (exchange/room.py), so messages are large
STATE_BYTES = 12  # residual, variance, moment
ALPHAS = (1.5, 8.0)  # random tokens are all noise: many pass, and few


@dataclass(frozen=True)
class Reading:
    """Bytes on the device after a step, and the highest during one step, by batch."""

    steady: int
    peaks: dict[Batch, int]


@dataclass(frozen=True)
class Found:
    """What one rank read. first: the highest of the steps until messages have settled, a dense one among them."""

    n_parameters: int
    plain: Reading
    attached: Reading
    first: int
    message: int


class Trainer:
    """Steps of GPT-2 under DDP, bf16 autocast and AdamW, on random tokens."""

    def __init__(self, device: str, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.device, self.words = device, sizes["vocabulary"]
        self.model = DistributedDataParallel(GPT(**sizes).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, batch: Batch) -> None:
        samples, positions = batch
        ids = torch.randint(0, self.words, (samples, positions + 1), device=self.device)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            output = self.model(ids[:, :-1])
        F.cross_entropy(output.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        self.optimizer.step()

    def peak(self, batch: Batch, steps: int = 1) -> int:
        """The highest of these steps."""
        if self.device == "cpu":  # counts nothing: to try the program without a GPU
            for _ in range(steps):
                self.step(batch)
            return 1
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            self.step(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def read(self, batches: tuple[Batch, ...]) -> Reading:
        for batch in batches:
            self.peak(batch, 2)
        peaks = {batch: self.peak(batch) for batch in batches}
        return Reading(1 if self.device == "cpu" else torch.cuda.memory_allocated(), peaks)


def measure(device: str, sizes: dict[str, int], batches: tuple[Batch, ...], settle: int, alpha: float) -> Found:
    """On every rank: plain DDP, then the same model attached."""
    trainer = Trainer(device, sizes)
    plain = trainer.read(batches)
    wire = gradwire.attach(trainer.model, gradwire.VGC(alpha=alpha), strict=True)
    first = trainer.peak(batches[0], settle)
    attached = trainer.read(batches)
    wire.reset_stats()
    trainer.step(batches[0])
    n_parameters = sum(p.numel() for p in trainer.model.parameters())
    return Found(n_parameters, plain, attached, first, wire.stats().bytes_sent)


def rows(
    device: str = "cuda",
    sizes: dict[str, int] | None = None,
    batches: tuple[Batch, ...] = (FEW, MANY),
    settle: int = SETTLE,
) -> Iterator[Row]:
    sizes = sizes or {"vocabulary": 50257, "positions": 1024, "width": 768, "depth": 12}
    for alpha, world_size in itertools.product(ALPHAS, (1, 2)):
        found = on_ranks(world_size, measure, device, sizes, batches, settle, alpha)[0]
        row = partial(row_of, found, world_size, alpha)
        yield row("between two steps", found.attached.steady - found.plain.steady)
        for batch in batches:
            beyond = found.attached.peaks[batch] - found.plain.peaks[batch]
            yield row("highest of a step, B {} T {}".format(*batch), beyond)
        beyond = found.first - found.plain.peaks[batches[0]]
        few = "B {} T {}".format(*batches[0])
        yield {**row(f"highest of the first {settle} steps, one of them dense, {few}", beyond), "bar": None}


def row_of(found: Found, world_size: int, alpha: float, when: str, n_bytes: int) -> Row:
    n_parameters = found.n_parameters
    reference = STATE_BYTES + (world_size + 1) * found.message / n_parameters
    ratio = n_bytes / n_parameters / reference
    return {
        "what": f"memory beyond plain DDP, GPT-2 {n_parameters / 1e6:.0f}M, alpha {alpha:g}, W {world_size}, {when}",
        "against": f"12 + {world_size + 1} messages of {found.message / 2**20:.2f} MiB",
        "value": n_bytes / n_parameters,
        "reference": reference,
        "unit": "B a parameter",
        "ratio": ratio,
        "bar": 1.0,
        "holds": ratio <= 1.0,
    }

"""A host of test_lab_bytes.py: trains with the methods on its command line, and stops where counters are read."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.methods.table import from_spec

WARM, COUNTED = 3, 12  # steps; VGC's first is dense


def main() -> None:
    dist.init_process_group("gloo")
    for method in sys.argv[1:]:
        exchange(method)
    dist.destroy_process_group()


def exchange(method: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 100)))
    wire = gradwire.attach(model, from_spec(method))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, WARM)
    wire.reset_stats()
    pause("")
    train(model, optimizer, COUNTED)
    stats = wire.stats()
    pause(json.dumps({name: getattr(stats, name) for name in ("steps", "dense_steps", "bytes_sent", "bytes_received")}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(100, (32,))).backward()
        optimizer.step()


def pause(text: str) -> None:
    """All hosts are here and nothing is on its way; go on when there is a line to read."""
    dist.barrier()
    print(text, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

"""A DistributedDataParallel script that survives a worker that dies: torchrun starts all of them again, and they go on.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restarts.py runs/restarts
"""

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, SAVE_EVERY, BATCH, FEATURES, CLASSES = 400, 20, 32, 64, 10


def main(folder: Path) -> None:
    # no longer than a worker may have to wait for another: after that a lost one is an error, and a restart
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()

    torch.manual_seed(0)
    teacher = torch.randn(FEATURES, CLASSES)
    network = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    model = DistributedDataParallel(network)
    wire = gradwire.attach(model, gradwire.VGC(alpha=1.5))
    optimizer = torch.optim.Adam(model.parameters())

    first = load(folder, network, optimizer, wire)
    if rank == 0:
        print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} begins after step {first}", flush=True)
    for step in range(first + 1, STEPS + 1):
        samples = torch.Generator().manual_seed(1_000_000 * rank + step)  # of this step, so that none must be saved
        inputs = torch.randn(BATCH, FEATURES, generator=samples)
        targets = (inputs @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            save(folder, step, network, optimizer, wire)
    if rank == 0:
        print(f"step {STEPS}: loss {loss.item():.3f}; {wire.stats()}")
    dist.destroy_process_group()


def save(folder: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """All ranks. It has its name when it is whole, and the one before stays until then."""
    unfinished, final = folder / "unfinished", folder / f"step-{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    gradwire.save(wire, unfinished / "wire")  # what every rank holds back
    if dist.get_rank() == 0:
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, unfinished / "training.pt")
        unfinished.rename(final)
        for older in set(folder.glob("step-*")) - {final}:
            shutil.rmtree(older)
    dist.barrier()


def load(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> int:
    """All ranks. The step to go on after; 0 where nothing was saved."""
    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        return 0
    content = torch.load(newest / "training.pt", weights_only=True)
    network.load_state_dict(content["network"])
    optimizer.load_state_dict(content["optimizer"])
    gradwire.load(wire, newest / "wire")
    return int(newest.name.removeprefix("step-"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

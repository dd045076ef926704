"""Local steps: a script without DDP and one line of gradwire. torchrun --nproc-per-node 4 examples/local_steps.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gradwire

STEPS, BATCH, FEATURES, CLASSES = 200, 32, 64, 10


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same teacher everywhere, other samples on every worker
    teacher = torch.randn(FEATURES, CLASSES)
    network = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    samples = torch.Generator().manual_seed(1 + rank)

    optimizer = torch.optim.AdamW(network.parameters())
    wire = gradwire.local(network, optimizer, gradwire.VGC(alpha=0, density=1 / 32), every=10)  # <-- the one added line

    for step in range(1, STEPS + 1):
        inputs = torch.randn(BATCH, FEATURES, generator=samples)
        targets = (inputs @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}; {wire.stats()}")

    wire.finish()  # all workers hold the same weights
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A host of test_auto_lab.py: trains with "auto" and says after every step what is in use; ends when told to."""

from __future__ import annotations

import json
import select
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.methods import to_spec


def main(n_steps: int, compute_s: float) -> None:
    """compute_s: what a step takes at least, so that the link decides and not the machine."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    plain = {name: module.__dict__.get("forward") for name, module in net.named_modules()}
    wire = gradwire.attach(model, "auto", methods=["bf16", "vgc:alpha=1.5"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    print("ready", flush=True)
    for step in range(n_steps):
        time.sleep(compute_s)
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)).backward()
        optimizer.step()
        swapped = any(module.__dict__.get("forward") is not plain[name] for name, module in net.named_modules())
        say(step=step, method=to_spec(wire.compressor), swapped=swapped, words=wire.verdict and wire.verdict.words)
        if told_to_end():
            break
    say(parameters=float(sum(p.detach().double().sum() for p in model.parameters())))
    dist.destroy_process_group()


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


# The last one is kept: Gloo's thread lets go of it after everybody else, and needs Python for that. Where Python ends
# meanwhile the process hangs (torch 2.13, plain DDP too: one of some tens of programs that end right after a sum).
asked: list[dist.Work] = []


def told_to_end() -> bool:
    """All ranks together."""
    told = torch.tensor([float(bool(select.select([sys.stdin], [], [], 0)[0]))])
    asked[:] = [dist.all_reduce(told, async_op=True)]
    asked[0].wait()
    return bool(told)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

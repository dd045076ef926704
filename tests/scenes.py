"""Small models, data and training loops that run inside test workers."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

TINY_BUCKETS = 1e-5  # MB: every parameter of `net` has a bucket of its own, once DDP has rebuilt them


def net(seed: int = 0) -> nn.Sequential:
    """Ten parameters in five layers, with an in-place activation."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(inplace=True),
        nn.Linear(24, 24),
        nn.LayerNorm(24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.ReLU(inplace=True),
        nn.Linear(24, 5),
    )


def batch(step: int, rank: int | None = None, size: int = 8) -> tuple[Tensor, Tensor]:
    """Each rank's own data; a learnable problem with noise."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 12, generator=generator)
    y = (x[:, :5] + 0.5 * torch.randn(size, 5, generator=generator)).argmax(1)
    return x, y


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"bucket_cap_mb": TINY_BUCKETS, **options})


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def digest(tensors: Any) -> str:
    """A fingerprint of every bit of the tensors."""
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return text.hexdigest()


def train(
    model: DistributedDataParallel,
    steps: range,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> Iterator[str]:
    """Plain training; yields the parameters' fingerprint after every step."""
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(model, x), y).backward()
        optimizer.step()
        yield digest(model.parameters())


def run(compressor: Any, n_steps: int = 12, attach: dict[str, Any] | None = None, **options: Any) -> list[str]:
    """Fingerprints after every step of `net` under a compressor; None is plain DDP."""
    model = ddp(net(), **options)
    wire = None if compressor is None else gradwire.attach(model, compressor, **(attach or {}))
    prints = list(train(model, range(n_steps), sgd(model)))
    if wire is not None:
        assert wire.steps == n_steps
    return prints


def state_of(wire: gradwire.Wire, field: str) -> dict[str, Tensor]:
    return {name: fields[field] for name, fields in wire.state_dict()["parameters"].items()}


def held(wire: gradwire.Wire) -> float:
    """How much is held back, all parameters together."""
    return float(sum(residual.abs().sum() for residual in state_of(wire, "residual").values()))


def train_and_save(directory: Path, n_steps: int) -> dict[str, Any]:
    """Trains `net` and saves its wire by all ranks; returns this rank's state."""
    model = ddp(net())
    wire = gradwire.attach(model, gradwire.VGC(alpha=2.0))
    list(train(model, range(n_steps), sgd(model)))
    gradwire.save(wire, directory)
    return wire.state_dict()


def scaled_run(compressor: Any, scales: list[float], n_steps: int) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Training under GradScaler("cpu") with a given sequence of scales: the parameters, and what is held."""
    model = ddp(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    wire = gradwire.attach(model, compressor, scaler=scaler)
    optimizer = sgd(model)
    for step in range(n_steps):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update(scales[(step + 1) % len(scales)])
    return digest(model.parameters()), wire.state_dict()["parameters"]


def straight(compressor, n_steps):
    """A training without a break."""
    return run(compressor, n_steps)


def interrupted(compressor, stop, n_steps, through_file):
    """Trains to `stop`, saves, builds everything anew, loads, goes on."""
    model = ddp(net())
    wire = gradwire.attach(model, compressor)
    optimizer = sgd(model)
    prints = list(train(model, range(stop), optimizer))
    saved = io.BytesIO()
    torch.save([wire.state_dict(), model.module.state_dict(), optimizer.state_dict()], saved)
    if through_file:
        gradwire.save(wire, through_file)
    model = ddp(net(seed=9))
    saved.seek(0)
    state, weights, momentum = torch.load(saved, weights_only=True)
    model.module.load_state_dict(weights)
    optimizer = sgd(model)
    optimizer.load_state_dict(momentum)
    wire = gradwire.attach(model, compressor)
    if through_file:
        gradwire.load(wire, through_file, strict=True)
    else:
        wire.load_state_dict(state, strict=True)
    assert wire.steps == stop
    return prints + list(train(model, range(stop, n_steps), optimizer))

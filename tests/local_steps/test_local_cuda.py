"""Local steps on a GPU: NCCL with one worker, Gloo with two on the same GPU; as on a CPU, and what a GPU has more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
import scenes
from local_steps.scripted import Scripted, small_net
from workers import Workers

pytestmark = pytest.mark.gpu
METHODS = ["dense", "bf16", "vgc:alpha=0,density=0.1", "topk:density=0.1,exact=true", "qsgd", "powersgd:rank=1"]
LATE = {"every": 4, "delay": 2, "fragments": 2}


@pytest.fixture(scope="module", params=[("nccl", 1), ("gloo", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    backend, world_size = request.param
    made = Workers(world_size, backend=backend)
    yield made
    made.close()


def scripted(device: str, method: str, options: dict[str, Any]) -> list[Tensor]:
    """The base weights after three rounds of given changes, and what is held back."""
    net = small_net().to(device)
    optimizer = Scripted(net, dist.get_rank())
    wire = gradwire.local(net, optimizer, method, **options)
    for _ in range(13):
        optimizer.step()
    fields = wire.state_dict()["parameters"].values()
    wire.detach()
    return [one[field].cpu() for one in fields for field in ("base", "weights", "residual") if field in one]


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    """Over Gloo, whose groups take tensors of both devices."""
    made = Workers(2)
    yield made
    made.close()


@pytest.mark.parametrize("options", [{"every": 4}, LATE], ids=["plain", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_does_what_a_cpu_does(two: Workers, method: str, options: dict[str, Any]) -> None:
    on_cpu, on_gpu = (two.run(scripted, device, method, options) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        for expected, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # weights up to 1, rounded a few times


def trained(method: str, options: dict[str, Any], fused: bool, resumes: bool) -> tuple[str, list[float], int, float]:
    torch.cuda.set_device(0)
    net = scenes.net(seed=dist.get_rank()).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40 if fused else 1.0)
    wire = gradwire.local(net, optimizer, method, **options)
    losses = []
    for step in range(60):
        x, y = (tensor.cuda() for tensor in scenes.batch(step, size=32))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=fused):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        if resumes and step == 30:
            wire.load_state_dict(wire.state_dict())
    steps = wire.steps
    wire.finish()
    return scenes.digest(net.parameters()), losses, steps, wire.stats().waited_ms


@pytest.mark.parametrize("options", [{"every": 4}, LATE], ids=["plain", "late"])
@pytest.mark.parametrize("method", ["vgc:alpha=0,density=0.1", "dense", "qsgd"])
def test_replicas_are_equal_and_learn(workers: Workers, method: str, options: dict[str, Any]) -> None:
    found = workers.run(trained, method, options, False, False)
    assert len({digest for digest, *_ in found}) == 1
    losses = found[0][1]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert found[0][2] == 60


def test_a_fused_optimizer_that_leaves_steps_out(workers: Workers) -> None:
    """It is called with an inf in its gradients, and does nothing: no step has been taken."""
    found = workers.run(trained, "vgc:alpha=0,density=0.1", {"every": 4}, True, False)
    assert len({digest for digest, *_ in found}) == 1
    assert 20 < found[0][2] < 60


def test_what_was_saved_goes_on_bit_for_bit(workers: Workers) -> None:
    whole, interrupted = (workers.run(trained, "vgc:alpha=0,density=0.1", LATE, False, one) for one in (False, True))
    assert [one[0] for one in whole] == [one[0] for one in interrupted]

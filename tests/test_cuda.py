"""The same promises on a GPU: NCCL with one worker (all that one GPU allows), Gloo with two on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import BF16, VGC, Dense
from workers import Workers

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[("nccl", 1), ("gloo", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def workers(request) -> Iterator[Workers]:
    backend, world_size = request.param
    made = Workers(world_size, backend=backend)
    yield made
    made.close()


def gpu_run(compressor, n_steps, fp16=False, capture=False):
    torch.cuda.set_device(0)
    torch.backends.cudnn.deterministic = True
    model = DistributedDataParallel(scenes.net().cuda(), device_ids=[0], bucket_cap_mb=scenes.TINY_BUCKETS)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=5, enabled=fp16)
    wire = None if compressor is None else gradwire.attach(model, compressor, scaler=scaler, strict=True)
    if capture:
        wire.capture(scenes.batch(0, size=32)[0].cuda())
    optimizer = scenes.sgd(model)
    prints, losses = [], []
    for step in range(n_steps):
        x, y = (tensor.cuda() for tensor in scenes.batch(step, size=32))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        prints.append(scenes.digest(model.parameters()))
        losses.append(float(loss.detach()))
    return prints, losses, None if wire is None else (wire.stats(), wire.state_dict()["parameters"])


def test_dense_is_plain_ddp(workers):
    assert workers.run(gpu_run, Dense(), 8)[0][0] == workers.run(gpu_run, None, 8)[0][0]


@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), VGC(alpha=1.0, tau=0.01), BF16()], ids=repr)
def test_replicas_are_equal_and_learn(workers, compressor):
    results = workers.run(gpu_run, compressor, 40)
    prints, losses, (stats, _) = results[0]
    assert all(other[0] == prints for other in results)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    if isinstance(compressor, VGC):
        assert stats.encode_ms > 0
        assert stats.decode_ms > 0
        assert stats.ratio > 1.5


def test_captured_as_cuda_graphs(workers):
    """It learns as without them, the replicas are equal, and no moment became an estimate (strict)."""
    results = workers.run(gpu_run, VGC(alpha=1.0), 40, False, True)
    assert all(other[0] == results[0][0] for other in results)
    without = workers.run(gpu_run, VGC(alpha=1.0), 40)[0]
    assert results[0][1][:3] == pytest.approx(without[1][:3], rel=1e-2)
    assert sum(results[0][1][-5:]) < 0.8 * sum(results[0][1][:5])
    assert results[0][2][0].ratio == pytest.approx(without[2][0].ratio, rel=0.2)


def test_fp16_with_a_scaler_that_comes_down(workers):
    results = workers.run(gpu_run, VGC(alpha=1.0), 40, True)
    assert all(other[0] == results[0][0] for other in results)
    assert sum(results[0][1][-5:]) < 0.8 * sum(results[0][1][:5])


def same_decisions():
    """The reference kernels on the GPU and on the CPU: same elements, same bytes, same state."""
    from gradwire.layout import Layout
    from gradwire.methods import Context

    layout = Layout.of([("a", (1000, 33)), ("b", (1,)), ("c", (4097,))])
    capacity = tuple(max(1, slot.numel // 3) for slot in layout)
    sizes = []
    for compressor in (VGC(alpha=1.0), VGC(alpha=1.0, feedback=True, rounding="unbiased"), VGC(alpha=2.0, tau=0.1)):
        states = {device: compressor.init(layout, torch.device(device)) for device in ("cpu", "cuda")}
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            grad = torch.randn(layout.numel, generator=generator) * torch.rand(layout.numel, generator=generator).exp()
            moment = grad.square() * torch.rand(layout.numel, generator=generator)
            context = Context(layout, step, capacity)
            data = {
                device: compressor.encode(grad.to(device), moment.to(device), state, context).data.cpu()
                for device, state in states.items()
            }
            assert torch.equal(data["cpu"], data["cuda"])
            for field in ("residual", "variance"):
                cpu, cuda = (getattr(state, field).cpu() for state in states.values())
                assert torch.equal(cpu, cuda)
            sizes.append(int((data["cpu"] != 0).sum()))
    return sizes, dist.get_world_size()


def test_the_gpu_decides_as_the_cpu_does(workers):
    assert max(workers.run(same_decisions)[0][0]) > 100

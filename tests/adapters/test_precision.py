"""Mixed precision, half-precision models and torch.compile through DDP, with real processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC, Dense


def autocast_run(dtype, compressor, n_steps=80):
    """bf16 or fp16 autocast, the latter with a GradScaler that starts too high and has to come down."""
    model = scenes.ddp(scenes.net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5, enabled=dtype == torch.float16)
    gradwire.attach(model, compressor, scaler=scaler)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses, scales, prints = [], [], []
    for step in range(n_steps):
        x, y = scenes.batch(step, size=32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
        scales.append(scaler.get_scale())
        prints.append(scenes.digest(model.parameters()))
    return losses, scales, prints


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_and_without_a_scaler(spawn, dtype):
    results = spawn(2, autocast_run, dtype, VGC(alpha=1.0))
    losses, scales, prints = results[0]
    assert prints == results[1][2]
    assert all(loss == loss for loss in losses)
    dense = spawn(2, autocast_run, dtype, Dense())[0][0]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert sum(losses[-8:]) < 1.25 * sum(dense[-8:])
    if dtype == torch.float16:
        assert min(scales) < 2.0**24  # it overflowed and came down: steps were skipped
        assert len(set(prints)) < len(prints)


def half_model():
    model = scenes.ddp(scenes.net().to(torch.bfloat16))
    wire = gradwire.attach(model, VGC(alpha=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prints = []
    for step in range(6):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
        optimizer.step()
        prints.append(scenes.digest(p.float() for p in model.parameters()))
    return prints, {field.dtype for field in scenes.state_of(wire, "residual").values()}, wire.stats().dense_bytes


def test_a_model_in_bfloat16_keeps_its_residual_in_float32(spawn):
    results = spawn(2, half_model)
    assert results[0] == results[1]
    prints, dtypes, dense_bytes = results[0]
    assert len(set(prints)) == 6
    assert dtypes == {torch.float32}
    assert dense_bytes == 6 * 2 * 1685  # plain DDP would send bfloat16


def compiled(order):
    """torch.compile inside or outside of DDP; the backend keeps torch's own kernels, so that the bits can agree."""
    torch._dynamo.reset()
    if order == "outside":
        model = torch.compile(DistributedDataParallel(scenes.net()), backend="aot_eager")
    elif order == "inside":
        model = DistributedDataParallel(torch.compile(scenes.net(), backend="aot_eager"))
    else:
        model = DistributedDataParallel(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0), strict=True)
    list(scenes.train(model, range(5), scenes.sgd(model)))
    return wire.state_dict()["parameters"], [p.detach().clone() for p in model.parameters()], wire.coverage()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_compiled_models_send_what_eager_ones_send(spawn, order):
    eager, ours = spawn(2, compiled, "eager"), spawn(2, compiled, order)
    assert all(torch.equal(a, b) for a, b in zip(ours[0][1], ours[1][1], strict=True))
    for (state, parameters, rows), (expected, expected_parameters, _) in zip(ours, eager, strict=True):
        assert state.keys() == expected.keys()
        assert {row.kind for row in rows} == {"exact"}
        for now, then in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(now, then, rtol=1e-3, atol=1e-4)
        for name in state:
            close = torch.isclose(state[name]["residual"], expected[name]["residual"], rtol=1e-3, atol=1e-5)
            assert close.float().mean() > 0.98  # rounding may tip an element that stands on the edge

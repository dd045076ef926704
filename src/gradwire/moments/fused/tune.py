"""Step 1, moments: times plans for one Linear shape on this GPU and keeps the fastest for this user, on request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
import triton.testing

from gradwire.moments.fused.linear import run
from gradwire.moments.fused.tuning import (
    HALVES,
    Plan,
    Shape,
    cache_file,
    chip,
    hopper_plan,
    plan_for,
    plan_name,
    saved_plans,
)


def candidates(shape: Shape, programs: int) -> Iterator[Plan]:
    """The model's plan, and its neighbours."""
    model = hopper_plan(shape, programs)
    scale = 64 // model.step
    for stages in (5, 6, 7):
        for group in (8, 16):
            yield replace(model, stages=stages * scale, group=group)
    yield replace(model, whole=shape.tiles, share=shape.samples)
    for n_parts in (2, 3, 4, 6, 8):
        for whole in {0, shape.tiles // programs * programs}:
            if whole < shape.tiles and n_parts <= shape.samples:
                yield replace(model, whole=whole, share=-(-shape.samples // n_parts))


def tune(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """The fastest plan for a shape, from now on used for it in every process of this user. Takes a few seconds."""
    device = torch.device("cuda", torch.cuda.current_device())
    if chip(device)[0] != 9 or dtype not in HALVES:
        raise ValueError(
            f"tune: expected a Hopper GPU and bfloat16 or float16, got {torch.cuda.get_device_name(device)} "
            f"and {dtype}; the other kernels have nothing to tune"
        )
    gradient = torch.randn(shape.samples, shape.positions, shape.outputs, dtype=dtype, device=device)
    x = torch.randn(shape.samples, shape.positions, shape.inputs, dtype=dtype, device=device)

    def time_ms(plan: Plan) -> float:
        call = triton.testing.do_bench_cudagraph
        return float(call(lambda: run(gradient, x, dtype, plan), rep=20, return_mode="median"))

    best = min(candidates(shape, chip(device)[1]), key=time_ms)
    path = cache_file()
    plans = {name: asdict(plan) for name, plan in saved_plans(path).items()}
    plans[plan_name(shape, dtype, device)] = asdict(best)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plans, indent=1))
    saved_plans.cache_clear()
    plan_for.cache_clear()
    return best

"""What a round of local steps costs where the link is none: encode, exchange over the loopback, decode, outer step.

Two processes with a core each train the byte GPT of `gradwire train --task text`, and a round is measured against their
own inner step, both within the same training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gradwire
from benchmarks.ranks import on_ranks
from gradwire.tools.train.text import CONTEXT, VOCABULARY, ByteTransformer

Row = dict[str, Any]
WORLD, BATCH = 2, 16
WARM, ROUNDS = 4, 20
BAR_STEPS = 1.5
METHODS = ("vgc:alpha=0,density=0.03125", "topk:density=0.03125", "dense", "bf16", "qsgd")


def rows() -> Iterator[Row]:
    for spec in METHODS:
        step_ms, round_ms = (max(times) for times in zip(*on_ranks(WORLD, on_a_cpu, spec), strict=True))
        yield {
            "what": f"a round of local steps, {spec}, byte GPT of 875,264 parameters, {WORLD} processes",
            "against": f"an inner step, batch {BATCH} x {CONTEXT} bytes, AdamW",
            "time_ms": round_ms,
            "reference_ms": step_ms,
            "bar": BAR_STEPS,
            "holds": round_ms <= BAR_STEPS * step_ms,
        }


def on_a_cpu(spec: str) -> tuple[float, float]:
    """Medians in ms of an inner step without a round, and of what a round takes beside one."""
    torch.manual_seed(0)
    net = ByteTransformer(CONTEXT, 128, 4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    times: list[float] = []  # of the inner step alone, as the wire's hook is called behind this one
    optimizer.register_step_post_hook(lambda *_: times.append(time.perf_counter()))
    gradwire.local(net, optimizer, spec, every=2)
    steps, rounds = [], []
    for number in range(2 * (WARM + ROUNDS)):
        begin = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        end = time.perf_counter()
        if number % 2:
            rounds.append(end - times[-1])
        else:
            steps.append(end - begin)
    return 1e3 * statistics.median(steps[WARM:]), 1e3 * statistics.median(rounds[WARM:])

"""Local steps in real processes against an oracle in scalar Python: two workers, three rounds, every kind of method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.arithmetic.shuffle import chosen
from gradwire.codec.quota import Quota
from gradwire.layout import Layout
from gradwire.local_steps.fragments import fragments_of
from gradwire.methods import PowerSGD
from local_steps import scalar_oracle
from local_steps.scalar_oracle import Oracle, Settings, all_of, by_chunks, drawn, largest, powers_of_two, thin
from local_steps.scripted import Scripted, changes, small_net
from workers import Pool


def places_drawn(name: str, number: int, density: float) -> list[int]:
    """The library's own draw, of one tensor by itself."""
    quota = Quota.of(Layout.of([(name, small_net().get_parameter(name).shape)]), density)
    return chosen(0, number, quota, torch.device("cpu"))[0].tolist()  # type: ignore[no-any-return]


def beginnings(rank: int) -> tuple[dict[str, tuple[int, int]], dict[str, list[list[float]]]]:
    """Of PowerSGD: which matrices go as two thin ones, and what was drawn for each."""
    layout = Layout.of((name, parameter.shape) for name, parameter in small_net().named_parameters())
    basis = PowerSGD(rank).init(layout, torch.device("cpu")).basis
    shapes = {slot.name: (slot.shape[0], slot.shape[1]) for slot in layout if slot.name in basis}
    return shapes, {name: rows.tolist() for name, rows in basis.items()}


@dataclass
class Case:
    """What the library is told, and what the oracle is."""

    method: str
    options: dict[str, Any]
    settings: Settings
    compress: Any
    rounds: int = 3


CASES = {
    "sum": Case("dense", {"every": 4}, Settings(4, keeps=False), all_of),
    "sum with momentum, not Nesterov's": Case(
        "dense",
        {"every": 3, "outer_momentum": 0.8, "nesterov": False, "outer_lr": 0.5},
        Settings(3, 0.5, 0.8, nesterov=False, keeps=False),
        all_of,
    ),
    "gathered, largest": Case("topk:density=0.2,exact=true", {"every": 4}, Settings(4), largest(0.2)),
    "gathered, every step": Case("topk:density=0.2,exact=true", {"every": 1}, Settings(1), largest(0.2)),
    "gathered, no decay": Case(
        "topk:density=0.1,exact=true", {"every": 2, "decay": 1.0}, Settings(2, decay=1.0), largest(0.1)
    ),
    "gathered, four bits": Case("vgc:alpha=0,density=1.0", {"every": 4}, Settings(4), powers_of_two),
    "gathered, chunks": Case("chunk_topk:chunk=32,k=8", {"every": 4}, Settings(4), by_chunks(32, 8)),
    "rounds, drawn": Case(
        "randomk:density=0.2",
        {"every": 4, "outer_momentum": 0.5},
        Settings(4, 1.0, 0.5),
        drawn(lambda name, number: places_drawn(name, number, 0.2)),
    ),
    "rounds, thin matrices": Case("powersgd:rank=2", {"every": 4}, Settings(4), thin(*beginnings(2))),
    "rounds, late": Case(
        "powersgd:rank=1",
        {"every": 4, "delay": 2, "fragments": 2},
        Settings(4, fragments=2, delay=2),
        thin(*beginnings(1)),
    ),
    "sparseloco": Case("sparseloco", {"every": 6}, Settings(6), by_chunks(4096, 64)),
    "diloco": Case("diloco", {"every": 5}, Settings(5, 0.7, 0.9, keeps=False), all_of),
    "streaming_diloco": Case(
        "streaming_diloco",
        {"every": 6, "delay": 2, "fragments": 3},
        Settings(6, 0.4, 0.9, decay=0.0, fragments=3, delay=2, mixing=0.5),
        powers_of_two,
    ),
    "late": Case("dense", {"every": 4, "delay": 3}, Settings(4, delay=3, keeps=False), all_of),
    "late, in fragments": Case(
        "topk:density=0.3,exact=true",
        {"every": 4, "delay": 1, "fragments": 2},
        Settings(4, delay=1, fragments=2),
        largest(0.3),
    ),
    "more fragments than steps": Case(
        "topk:density=0.3,exact=true", {"every": 2, "fragments": 3}, Settings(2, fragments=3), largest(0.3)
    ),
}


def trained(method: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    net = small_net()
    optimizer = Scripted(net, dist.get_rank())
    wire = gradwire.local(net, optimizer, method, **options)
    for _ in range(steps):
        optimizer.step()
    fields = wire.state_dict()["parameters"]
    return {name: {"weights": net.get_parameter(name).detach(), **one} for name, one in fields.items()}


@pytest.mark.parametrize("name", CASES)
def test_as_the_oracle(spawn: Pool, name: str) -> None:
    case = CASES[name]
    net, steps = small_net(), case.rounds * case.settings.every + case.settings.delay
    tensors = {n: p.detach().flatten().tolist() for n, p in net.named_parameters()}
    parts = fragments_of({n: len(v) for n, v in tensors.items()}, case.settings.fragments)
    oracle = Oracle(tensors, parts, 2, case.settings)
    oracle.run(steps, lambda *where: changes(*where).tolist(), case.compress)
    assert len(oracle.told) >= case.rounds * case.settings.fragments

    for found, worker in zip(spawn(2, trained, case.method, case.options, steps), oracle.workers, strict=True):
        for tensor, fields in found.items():
            close(fields["base"], oracle.base[tensor])
            close(fields["weights"], worker.weights[tensor])
            if case.settings.keeps and case.settings.decay:
                close(fields["residual"], worker.e[tensor])
            if case.settings.momentum:
                close(fields["outer_momentum"], oracle.velocity[tensor])


def close(found: torch.Tensor, expected: list[float]) -> None:
    """To the rounding of a few float32 operations on numbers up to 1; a change of a step is 0.01."""
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), rtol=0, atol=5e-7)


def test_the_oracle_rounds_to_powers_of_two() -> None:
    """The worked example of the method."""
    found = scalar_oracle.powers_of_two([[0.04, 0.31, -6.25, 22.25, -35.75]], "", 0)
    assert found == [[0.0, 0.25, -8.0, 16.0, -32.0]]

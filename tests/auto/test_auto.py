"""`attach(model, "auto")`: who may be chosen, and that all ranks do the same, on a link that has no limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import BF16, VGC, Dense
from gradwire.errors import AttachError, CheckpointError, DisagreementError

STEPS = 30


def made() -> DistributedDataParallel:
    return DistributedDataParallel(scenes.net(), bucket_cap_mb=scenes.TINY_BUCKETS)


def train(model: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = scenes.batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def trained(methods: list[Any]) -> tuple[str, str, list[Tensor], bool]:
    model = made()
    wire = gradwire.attach(model, "auto", methods=methods)
    assert isinstance(wire.compressor, Dense)
    assert wire.verdict is None
    train(model, range(STEPS))
    assert wire.verdict is not None
    swapped = any("forward" in module.__dict__ for module in model.module.modules())
    return repr(wire.compressor), wire.verdict.words, [p.detach() for p in model.parameters()], swapped


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_choose_the_same(spawn, world_size):
    (method, words, parameters, _), *others = spawn(world_size, trained, [BF16(), "vgc:alpha=1", "powersgd:rank=2"])
    for other in others:
        assert other[:2] == (method, words)
        assert all(torch.equal(one, two) for one, two in zip(parameters, other[2], strict=True))


def test_sums_alone_leave_the_forwards_as_they_are(spawn):
    for method, words, _, swapped in spawn(2, trained, ["bf16"]):
        assert not swapped
        assert method in ("Dense()", "BF16()")
        assert "on this link" in words


def one_worker_alone() -> str:
    model = DistributedDataParallel(scenes.net(), process_group=dist.new_group([dist.get_rank()]))
    wire = gradwire.attach(model, "auto")
    train(model, range(STEPS))
    return repr(wire.compressor)


def test_one_worker_has_nothing_to_send(spawn):
    assert spawn(1, one_worker_alone) == ["Dense()"]


def refused(kind: str) -> str:
    model = made()
    given: dict[str, tuple[Any, Any]] = {
        "unknown": ("auto", ["nonsense"]),
        "unknown option": ("auto", ["vgc:beta=1"]),
        "no method": ("auto", [3]),
        "not auto": (VGC(), ["bf16"]),
        "other methods": ("auto", ["bf16"] if dist.get_rank() else ["vgc"]),
        "misspelt": ("automatic", None),
    }
    compressor, methods = given[kind]
    try:
        gradwire.attach(model, compressor, methods=methods)
    except (ValueError, TypeError, DisagreementError, AttachError) as error:
        train(model, range(2))  # plain DDP
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", "ValueError: unknown compressor 'nonsense'"),
        ("unknown option", "ValueError: unknown option 'beta=1'"),
        ("no method", "TypeError: expected a compressor"),
        ("not auto", "ValueError: attach: methods are what"),
        ("other methods", "DisagreementError: the ranks do not have the same methods of auto"),
        ("misspelt", "TypeError: expected a compressor such as gradwire.VGC(alpha=1.5), got 'automatic'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(spawn, kind, words):
    for said in spawn(2, refused, kind):
        assert said.startswith(words)


def resumed() -> list[bool]:
    model, again = made(), made()
    wire = gradwire.attach(model, "auto", methods=["vgc:alpha=1"])
    wire._pilot.take_over(VGC(alpha=1.0))
    train(model, range(6))
    state = wire.state_dict()
    other = gradwire.attach(again, "auto", methods=["vgc:alpha=1"])
    other.load_state_dict(state)
    held = other.state_dict()["parameters"]
    same = [
        torch.equal(held[name][field], value) for name, f in state["parameters"].items() for field, value in f.items()
    ]
    third = gradwire.attach(made(), "auto", methods=["bf16"])
    try:
        third.load_state_dict(state)
    except CheckpointError as error:
        return [*same, isinstance(other.compressor, VGC), "add it to methods" in str(error)]
    return [False]


def test_a_checkpoint_goes_on_with_its_own_method(spawn):
    for facts in spawn(2, resumed):
        assert all(facts)


def overridden() -> tuple[str, str, bool]:
    model = made()
    wire = gradwire.attach(model, "auto")
    wire.compressor = VGC(alpha=2)
    train(model, range(STEPS))
    chosen, link = repr(wire.compressor), wire._link
    wire.detach()
    train(model, range(STEPS, STEPS + 2))
    return chosen, repr(link.compressor), link.between_steps is None


def test_who_sets_a_compressor_has_it(spawn):
    for chosen, after, silent in spawn(2, overridden):
        assert chosen == repr(VGC(alpha=2))
        assert after == "Dense()"
        assert silent

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
from gradwire.adapters.auto.trial_costs import likely_error, rival
from gradwire.errors import AttachError, CheckpointError, DisagreementError
from gradwire.methods import from_spec
from gradwire.plan.model import Prediction

STEPS = 60


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
        ("misspelt", "ValueError: unknown compressor 'automatic'; known: dense, bf16,"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(spawn, kind, words):
    for said in spawn(2, refused, kind):
        assert said.startswith(words)


def resumed() -> list[bool]:
    model, again = made(), made()
    wire = gradwire.attach(model, "auto", methods=["vgc:alpha=1"])
    wire._chooser.take_over(VGC(alpha=1.0))
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
    chosen, link = repr(wire.compressor), wire._reducer
    wire.detach()
    train(model, range(STEPS, STEPS + 2))
    return chosen, repr(link.compressor), link.between_steps is None


def test_who_sets_a_compressor_has_it(spawn):
    for chosen, after, silent in spawn(2, overridden):
        assert chosen == repr(VGC(alpha=2))
        assert after == "Dense()"
        assert silent


def dense_at_first() -> tuple[bool, dict[str, int], bool]:
    """On a link without a limit, and then with another method."""
    model, plain = made(), made()
    wire = gradwire.attach(model, "auto", methods=[])
    for one in (model, plain):
        train(one, range(STEPS))
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    stats = wire.stats()
    counted = {"steps": stats.steps, "dense": stats.dense_steps, "bytes": stats.bytes_sent, "ratio": round(stats.ratio)}
    wire.compressor = VGC(alpha=2)
    train(model, range(STEPS, STEPS + 3))
    return same, counted, wire.stats().steps == STEPS + 3


def test_while_dense_is_the_choice_it_is_plain_ddp_bit_for_bit(spawn):
    n_bytes = 4 * sum(parameter.numel() for parameter in scenes.net().parameters())
    expected = {"steps": STEPS, "dense": STEPS, "bytes": STEPS * n_bytes, "ratio": 1}
    assert spawn(2, dense_at_first) == [(True, expected, True)] * 2


def two_optimizers() -> tuple[int, bool]:
    model = made()
    wire = gradwire.attach(model, "auto")
    halves = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in (halves[:2], halves[2:])]
    for step in range(STEPS):
        inputs, targets = scenes.batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wire.steps, wire.verdict is not None


def test_two_optimizers_of_a_model_step_once(spawn):
    assert spawn(2, two_optimizers) == [(STEPS, True)] * 2


def detached() -> bool:
    model = made()
    gradwire.attach(model, "auto", methods=[]).detach()
    wire = gradwire.attach(model, Dense())
    train(model, range(2))
    return wire.stats().steps == 2


def test_what_was_detached_can_be_attached_again(spawn):
    assert spawn(2, detached) == [True] * 2


def test_what_was_wrong_is_expected_of_the_like():
    methods = {spec: from_spec(spec) for spec in ("dense", "bf16", "vgc:alpha=1", "powersgd:rank=2")}
    assert likely_error("bf16", {}, methods) == 1.0
    errors = {"dense": 1.1}
    assert [likely_error(spec, errors, methods) for spec in methods] == [1.1] * 4
    errors["vgc:alpha=1"] = 1.6  # says nothing of a sum
    assert [likely_error(spec, errors, methods) for spec in methods] == [1.1, 1.1, 1.6, 1.6]
    errors["powersgd:rank=2"] = 1.3
    assert [likely_error(spec, errors, methods) for spec in methods] == [1.1, 1.1, 1.6, 1.3]
    del errors["dense"]
    assert [likely_error(spec, errors, methods) for spec in methods] == [1.0, 1.0, 1.6, 1.3]


def test_a_method_that_may_be_faster_is_timed_once():
    methods = {spec: from_spec(spec) for spec in ("bf16", "vgc:alpha=1", "powersgd:rank=2", "topk:density=0.01")}
    took = {"bf16": 33.0, "vgc:alpha=1": 30.0, "powersgd:rank=2": 34.0, "topk:density=0.01": 33.0}
    predictions = {spec: Prediction(step_ms, 0.0, 0.0, 0.0) for spec, step_ms in took.items()}
    errors = {"vgc:alpha=1": 1.0}
    for likeliest in ("topk:density=0.01", "powersgd:rank=2", "bf16"):  # a sum is seldom as far from its prediction
        assert rival(predictions, errors, methods, below_ms=30.0) == likeliest
        assert rival(predictions, errors, methods, below_ms=23.0) is None
        errors[likeliest] = 1.2
    assert rival(predictions, errors, methods, below_ms=30.0) is None

"""What a method costs: bytes are those that InProcess counts, times are positive and add up to what was measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import METHODS, from_spec
from gradwire.plan.costs import SETTLE, Dry, measure
from gradwire.plan.model import Network, Work, predict
from gradwire.plan.typical import DENSITY, cost_of, work_of

WORLD, REPEATS = 3, 4
SPECS = [
    *("dense", "bf16", "fp16", "fp8", "onebit", "qsgd:bits=4", "signsgd", "terngrad", "adacomp", "strom:tau=0.5"),
    *("powersgd:rank=2", "randomk:density=0.05", "topk:density=0.02", "momentum_dct", "vgc:alpha=1.5"),
    *("vgc:alpha=1,density=0.01", "vgc:max_bytes_per_step=4000"),
]
KINDS = {"dense": "sum", "bf16": "sum", "fp16": "sum", "powersgd": "rounds", "randomk": "rounds"}


def layout() -> Layout:
    return Layout.of([("weight", (96, 130)), ("bias", (96,)), ("odd", (7, 3, 11))])


def steps(n_steps: int, numel: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a little signal in much noise, and the moments of 16 samples."""
    signal = torch.randn(numel) * (torch.rand(numel) < 0.05)
    grads = [signal + torch.randn(numel) for _ in range(n_steps)]
    return grads, [grad.square() / 16 + torch.rand(numel) for grad in grads]


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_what_ranks_count(spec):
    compressor, one = from_spec(spec), layout()
    n_steps = SETTLE + REPEATS + 5
    grads, moments = steps(n_steps, one.numel)
    dry = Dry(compressor, [one], WORLD, torch.device("cpu"))
    for grad, moment in zip(grads, moments, strict=True):
        dry.step([grad], [moment])
    cost = dry.cost(REPEATS)
    ranks = InProcess(compressor, one, WORLD, planned=True)
    counted = [ranks([g] * WORLD, [m] * WORLD).n_bytes for g, m in zip(grads, moments, strict=True)]
    assert cost.handed_over(one.numel) == pytest.approx(sum(counted[-REPEATS:]) / REPEATS, rel=1e-9)
    assert cost.kind == KINDS.get(spec.partition(":")[0], "gather")
    assert cost.overhead_ms > 0
    assert cost.encode_ns >= 0
    assert cost.decode_ns + cost.decode_message_ns > 0
    assert cost.moments == 1.0
    assert from_spec(cost.spec) == compressor


def test_buckets_share_one_capacity_and_times_add_up():
    compressor = from_spec("vgc:alpha=1.5")
    layouts = [Layout.of([("a", (64, 65))]), Layout.of([("b", (33, 31)), ("c", (5,))])]
    numels = [one.numel for one in layouts]
    dry = Dry(compressor, layouts, 4, torch.device("cpu"))
    for _ in range(12):
        grads, moments = zip(*(steps(1, numel) for numel in numels), strict=True)
        dry.step([grad[0] for grad in grads], [moment[0] for moment in moments])
    assert dry.times[0].dense
    assert dry.times[0].n_bytes > 4 * sum(numels)
    assert set(dry.capacity.passed) == {"a", "b", "c"}
    cost = dry.cost(5)
    encodes = sorted(times.encode for times in dry.times[-5:] if not times.dense)
    assert cost.encode_ns * sum(numels) / 1e6 + 2 * cost.overhead_ms >= encodes[0]
    assert sum(cost.handed_over(numel) for numel in numels) == pytest.approx(
        sum(times.n_bytes for times in dry.times[-5:]) / 5
    )


def test_given_gradients_are_left_alone():
    grads, moments = steps(1, layout().numel)
    kept = grads[0].clone(), moments[0].clone()
    for spec in ("dense", "bf16", "topk:density=0.02", "powersgd", "vgc"):
        measure(from_spec(spec), [layout()], grads, moments, 2, 2)
    assert torch.equal(grads[0], kept[0])
    assert torch.equal(moments[0], kept[1])


def test_one_step_that_is_repeated_stays_noise():
    """With changing signs nothing adds up: what is sent does not grow with the number of repeats."""
    numel = layout().numel
    grads, _ = steps(1, numel)
    clear = torch.rand(numel) < 0.01
    moments = [torch.where(clear, 0.0, 4 * grads[0].square())]
    few, many = (measure(from_spec("vgc:alpha=1.5"), [layout()], grads, moments, 4, n) for n in (3, 30))
    assert many.bytes_per_element == pytest.approx(few.bytes_per_element, rel=0.2)
    assert many.bytes_per_element < 0.15


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_method_has_typical_costs_or_a_guess(device):
    for name, known in METHODS.items():
        cost = cost_of(known.example or name, device)
        assert cost.guess == (getattr(known, device) is None)
        assert cost.bytes_per_element > 0
        assert cost.encode_ns > 0
        assert predict(work_of(10**6, 1.0, 2.0, 0.0), Network(4, 100.0, 0.1), cost).step_ms > 3


def test_typical_bytes_follow_options_and_density():
    assert cost_of("dense", "cpu").bytes_per_element == 4
    assert cost_of("bf16", "cpu").bytes_per_element == 2
    assert cost_of("qsgd:bits=8", "cpu").bytes_per_element > 1.9 * cost_of("qsgd:bits=4", "cpu").bytes_per_element
    ranks = [cost_of(f"powersgd:rank={rank}", "cpu") for rank in (2, 4)]
    assert ranks[1].bytes_per_element == pytest.approx(2 * ranks[0].bytes_per_element)
    assert ranks[0].rounds == 2
    default, tenth = cost_of("vgc", "cpu"), cost_of("vgc", "cpu", DENSITY / 10)
    assert 5 < default.bytes_per_element / tenth.bytes_per_element < 10
    assert default.encode_ns > tenth.encode_ns
    assert default.moments > 1.0
    assert default.room
    said = cost_of("vgc:density=0.001", "cpu", 0.5)  # what the method says counts
    assert 0.8 < said.bytes_per_element / tenth.bytes_per_element < 1  # and needs less room: it is kept


def test_buckets_are_those_of_ddp():
    assert work_of(124_000_000, 1.0, 2.0, 3.0).buckets[:2] == (262_144, 6_553_600)
    assert sum(work_of(124_000_000, 1.0, 2.0, 3.0).buckets) == 124_000_000
    assert work_of(5, 1.0, 2.0, 3.0) == Work((5,), 1.0, 2.0, 3.0)

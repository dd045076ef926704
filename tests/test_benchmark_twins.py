"""The benchmark of all methods: gradients arrive as given, bytes are counted alike, who is missing is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import methods_cpu, oracles_cpu, twins
from benchmarks.given import N_PARAMETERS, Computed, Given, Sample, Scene, mlp
from gradwire.methods import METHODS, from_spec


def test_the_model_has_the_parameters_it_says():
    assert sum(parameter.numel() for parameter in mlp().parameters()) == N_PARAMETERS


def test_a_given_gradient_is_the_computed_one():
    net = nn.Linear(4, 3)
    scene = Scene(net, [])
    computed, given = Computed(scene), Given(scene)
    sample = Sample(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), [])
    computed(*computed.arguments(sample)).backward()
    grads = [parameter.grad for parameter in computed.parameters()]
    given(*given.arguments(Sample(sample.inputs, sample.targets, grads))).backward()
    for parameter, grad in zip(given.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
        assert parameter.grad is not grad, "a step may write over it"


def counts_both(rank_count):
    with twins.Tally() as tally:
        dist.all_reduce(torch.zeros(10))
        dist.all_gather(
            [torch.zeros(6, dtype=torch.uint8) for _ in range(rank_count)], torch.ones(6, dtype=torch.uint8)
        )
    dist.all_reduce(torch.zeros(1000))
    return tally.n_bytes


def test_bytes_are_what_is_handed_to_collectives(spawn):
    assert spawn(2, counts_both, 2) == [46, 46]


def our_bytes():
    torch.manual_seed(0)
    scene = Scene(nn.Linear(64, 48), [])
    sample = Sample(torch.randn(8, 64), torch.zeros(8), [torch.randn(48, 64), torch.randn(48)])
    contenders = [methods_cpu.ours(spec, Given(scene)) for spec in ("dense", "fp16", "signsgd", "powersgd:rank=2")]
    for contender in contenders:
        for _ in range(2):
            contender.run(sample)
    return [contender.n_bytes[-1] for contender in contenders]


def test_our_own_bytes_are_counted_by_the_same_ruler(spawn):
    dense, half, signs, thin = spawn(2, our_bytes)[0]
    assert (dense, half) == (4 * 3120, 2 * 3120)
    assert 3120 / 8 < signs < 3120 / 8 + 64
    assert 4 * (2 * (64 + 48) + 48) <= thin < 4 * (2 * (64 + 48) + 48) + 16


@pytest.mark.parametrize("set_to", [None, "no such folder"])
def test_a_project_that_is_not_there_is_a_row_that_says_so(monkeypatch, set_to):
    monkeypatch.delenv(twins.FOLDER, raising=False)
    if set_to:
        monkeypatch.setenv(twins.FOLDER, set_to)
    monkeypatch.setattr(oracles_cpu, "EQUAL", oracles_cpu.EQUAL[1:])
    found = list(oracles_cpu.equal_rows()) + list(oracles_cpu.drawn_rows())
    assert all(row["against"].endswith(": not installed") for row in found)
    assert not any({"value", "time_ms", "bar"} & row.keys() for row in found)
    assert "GRACE top-k: not installed" in [row["against"] for row in found]


def test_every_pair_names_a_method_as_it_is():
    for name, pairs in methods_cpu.PAIRS.items():
        for spec, _ in pairs:
            assert type(from_spec(spec)) is METHODS[name].method


def test_rows_compare_the_slower_rank_and_the_same_bytes():
    figures = methods_cpu.Figures
    ranks = [(figures(3.0, 100.0), figures(4.0, 200.0)), (figures(5.0, 100.0), figures(2.0, 200.0))]
    times, bits = methods_cpu.rows_of("topk", SimpleNamespace(name="other"), ranks)
    assert (times["time_ms"], times["reference_ms"], times["holds"]) == (5.0, 4.0, False)
    assert bits["reference"] == 2 * bits["value"]
    assert bits["holds"]

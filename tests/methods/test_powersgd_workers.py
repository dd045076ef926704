"""PowerSGD in real processes: replicas and bases, an inf, another number of workers, another rank."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
import scenes
from gradwire import PowerSGD

METHOD = PowerSGD(rank=2, min_compression=1.0)


def with_one_inf(n_steps: int, spoiled: int) -> tuple[list[str], list[str], list[bool], int]:
    """Ten buckets, an inf on rank 1; the prints of the parameters and of the bases after every step."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, METHOD)
    prints, bases, finite = [], [], []
    optimizer = scenes.sgd(model, lr=0.05)
    for step in range(n_steps):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if step == spoiled and torch.distributed.get_rank() == 1:
            loss = loss * float("inf")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))  # type: ignore[union-attr]
        if finite[-1]:
            optimizer.step()
        prints.append(scenes.digest(model.parameters()))
        saved = wire.state_dict()["parameters"]
        bases.append(scenes.digest(fields["basis"] for fields in saved.values() if "basis" in fields))
    return prints, bases, finite, sum("basis" in fields for fields in saved.values())


@pytest.mark.parametrize("workers", [2, 3])
def test_replicas_and_bases_are_equal_through_a_bad_step(spawn: Any, workers: int) -> None:
    """torch's hook gives NaN for ever after one inf; here only the step that has it."""
    results = spawn(workers, with_one_inf, 8, 3)
    prints, bases, finite, n_matrices = results[0]
    assert all(other == results[0] for other in results)
    assert finite == [step != 3 for step in range(8)]
    assert n_matrices == 4
    assert bases[3] == bases[2]
    assert len(set(bases)) == len(set(prints)) == 7


def train_and_save(directory: Path) -> dict[str, Any]:
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, METHOD)
    list(scenes.train(model, range(5), scenes.sgd(model, lr=0.05)))
    gradwire.save(wire, directory)
    return wire.state_dict()


def load_and_train(directory: Path, states: list[dict[str, Any]]) -> tuple[dict[str, Any], list[list[str]]]:
    """From the directory, and from the states as reshard makes them."""
    prints = []
    for way in ("directory", "states"):
        model = scenes.ddp(scenes.net())
        wire = gradwire.attach(model, METHOD)
        if way == "directory":
            gradwire.load(wire, directory, strict=True)
            loaded = wire.state_dict()
        else:
            buffer = io.BytesIO()
            torch.save(states[torch.distributed.get_rank()], buffer)
            buffer.seek(0)
            wire.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
        prints.append(list(scenes.train(model, range(5, 9), scenes.sgd(model, lr=0.05))))
    return loaded, prints


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on_from_the_same_basis(spawn: Any, tmp_path: Path, old: int, new: int) -> None:
    before = spawn(old, train_and_save, tmp_path / "wire")
    states = gradwire.reshard(before, new)
    results = spawn(new, load_and_train, tmp_path / "wire", states)
    assert all(prints == results[0][1] for _, prints in results)
    assert results[0][1][0] == results[0][1][1]
    for name, fields in before[0]["parameters"].items():
        assert ("basis" in fields) == (name in {"0.weight", "2.weight", "5.weight", "7.weight"})
        for loaded, _ in results:
            if "basis" in fields:
                assert torch.equal(loaded["parameters"][name]["basis"], fields["basis"])
        mean = sum(state["parameters"][name]["residual"] for state in before) / old
        after = sum(loaded["parameters"][name]["residual"] for loaded, _ in results) / new
        torch.testing.assert_close(after, mean, rtol=1e-5, atol=1e-8)
    assert max(float(fields["residual"].abs().max()) for fields in before[0]["parameters"].values()) > 0


def rank_changed() -> tuple[list[str], list[tuple[int, ...]]]:
    """Another rank in the middle: what is held back stays, the basis begins anew."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, METHOD)
    optimizer = scenes.sgd(model, lr=0.05)
    list(scenes.train(model, range(3), optimizer))
    held = scenes.held(wire)
    wire.compressor = PowerSGD(rank=1)
    assert scenes.held(wire) == held
    prints = list(scenes.train(model, range(3, 6), optimizer))
    saved = wire.state_dict()["parameters"]
    return prints, [tuple(fields["basis"].shape) for fields in saved.values() if "basis" in fields]


def test_another_rank_in_the_middle(spawn: Any) -> None:
    results = spawn(2, rank_changed)
    assert results[0] == results[1]
    assert results[0][1] == [(1, 12), (1, 24), (1, 24), (1, 24)]

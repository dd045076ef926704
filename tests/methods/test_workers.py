"""Every method in real processes over Gloo, two and three of them, many buckets: replicas, resume, bytes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
import scenes
from gradwire.methods import Sum
from methods.rows import ROWS, Row

SHORT, LONG, STOP = 8, 40, 5  # steps
# a row of each method, and those that go another way over the wire
FIRST = {type(row.compressor): name for name, row in reversed(ROWS.items())}
REAL = {name: ROWS[name] for name in (*FIRST.values(), "signsgd vote", "powersgd cold", "topk dgc", "strom words")}


def rows(table: dict[str, Row]) -> Any:
    return pytest.mark.parametrize("name", table)


def sgd(model: nn.Module, row: Row) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=row.lr, momentum=row.momentum)


def trained(row: Row, n_steps: int, stop: int | None = None) -> tuple[list[str], list[float], Any]:
    """Fingerprints and losses of a run, which saves itself, is built anew and goes on at `stop`."""
    compressor = row.compressor
    model = scenes.ddp(scenes.net())
    optimizer = sgd(model, row)
    wire = gradwire.attach(model, compressor)
    prints, losses = [], []
    for step in range(n_steps):
        if step == stop:
            saved = io.BytesIO()
            torch.save([wire.state_dict(), model.module.state_dict(), optimizer.state_dict()], saved)
            saved.seek(0)
            state, weights, momentum = torch.load(saved, weights_only=True)
            model = scenes.ddp(scenes.net(seed=9))
            model.module.load_state_dict(weights)
            optimizer = sgd(model, row)
            optimizer.load_state_dict(momentum)
            wire = gradwire.attach(model, compressor)
            wire.load_state_dict(state, strict=True)
        x, y = scenes.batch(step, size=16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        prints.append(scenes.digest(model.parameters()))
        losses.append(float(loss.detach()))
    return prints, losses, wire.stats()


@rows(REAL)
def test_replicas_are_equal_and_it_learns(spawn: Any, name: str) -> None:
    """And a run that was interrupted has the same bits as one that was not."""
    row = REAL[name]
    results = spawn(2, trained, row, LONG if row.learns else SHORT)
    prints, losses, stats = results[0]
    assert all(other[0] == prints for other in results)
    assert len(set(prints)) == len(prints)
    if row.learns:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert stats.bytes_sent > 0
    assert stats.steps == len(losses)
    resumed = spawn(2, trained, row, SHORT, STOP)
    assert [one[0] for one in resumed] == [prints[:SHORT]] * 2


@rows(REAL)
def test_three_workers(spawn: Any, name: str) -> None:
    results = spawn(3, trained, REAL[name], SHORT)
    assert all(other[0] == results[0][0] for other in results)


def switched(compressor: Any) -> tuple[list[str], list[float]]:
    """To another method and on to plain DDP: nothing that is held back is lost on the way."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, compressor)
    optimizer = scenes.sgd(model, lr=0.05)
    prints = list(scenes.train(model, range(2), optimizer))
    wire.compressor = gradwire.VGC(alpha=1.0)
    prints += scenes.train(model, range(2, 4), optimizer)
    wire.compressor = compressor
    prints += scenes.train(model, range(4, 6), optimizer)
    wire.detach()
    prints += scenes.train(model, range(6, 8), optimizer)
    return prints, [float(residual.abs().sum()) for residual in wire._reducer.store.residuals()]


@rows({name: row for name, row in REAL.items() if not isinstance(row.compressor, Sum)})
def test_switching_loses_nothing(spawn: Any, name: str) -> None:
    results = spawn(2, switched, REAL[name].compressor)
    assert results[0][0] == results[1][0]
    assert not any(results[0][1])


class Sometimes(nn.Module):
    """A layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.rare(hidden) if rare else hidden)


def with_unused(compressor: Any) -> tuple[list[float], list[str]]:
    model = scenes.ddp(Sometimes(), find_unused_parameters=True)
    wire = gradwire.attach(model, compressor)
    optimizer, kept, prints = torch.optim.SGD(model.parameters(), lr=0.05), [], []
    for step in range(6):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, step % 3 == 0), y).backward()
        optimizer.step()
        fields = wire.state_dict()["parameters"].get("rare.weight", {})
        kept.append(float(fields["residual"].abs().sum()) if "residual" in fields else 0.0)
        prints.append(scenes.digest(model.parameters()))
    return kept, prints


@rows({name: row for name, row in REAL.items() if not isinstance(row.compressor, Sum)})
def test_unused_parameters_keep_what_they_hold(spawn: Any, name: str) -> None:
    results = spawn(2, with_unused, REAL[name].compressor)
    assert results[0][1] == results[1][1]
    kept = results[0][0]
    assert kept[0] == kept[1] == kept[2]
    assert kept[3] == kept[4] == kept[5]

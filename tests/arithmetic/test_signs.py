"""One bit an element: the machine code has the bits of plain torch, and the means are those of exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.arithmetic import signs
from gradwire.arithmetic.runs import Runs, columns_of, tensors_of
from gradwire.layout import Layout

SHAPES: list[tuple[int, ...]] = [
    (0,),
    (31,),
    (5, 0),
    (3, 11),
    (),
    (0, 4),
    (33, 2, 3),
    (1, 1),
    (4097,),
    (70, 1000),
    (0,),
]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
LARGEST = torch.finfo(torch.float32).max


def values(seed: int) -> Tensor:
    """Many binades, both zeros, denormals, and the largest there are."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(LAYOUT.numel, generator=generator) * 10 ** torch.empty(LAYOUT.numel).uniform_(
        -4, 2, generator=generator
    )
    flat[::7], flat[3::91] = 0.0, -0.0
    flat[LAYOUT.slots[3].offset :][:11] = (
        torch.tensor([1e-45, -1e-45, 0, -0.0, 1e-40, 2e-38, -3e-38, 0, 0, 1, -1]) * 1e-3
    )
    flat[LAYOUT.slots[6].offset :][:3] = LARGEST
    flat[LAYOUT.slots[6].offset + 9] = -LARGEST
    return flat


def plainly(patch: Any, function: Any) -> Any:
    with patch.context() as context:
        context.setattr(signs, "_compiled", lambda tensor: None)
        return function()


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("runs", [tensors_of(LAYOUT), columns_of(LAYOUT)], ids=["tensors", "columns"])
@pytest.mark.parametrize("zero_below", [False, True])
def test_machine_code_has_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, threads: None, runs: Runs, zero_below: bool
) -> None:
    def results() -> list[Tensor]:
        p, residual = values(0), values(1)
        largest = signs.gather(p, residual, runs)
        high = (signs.magnitudes(p, largest, runs) / runs.lengths(p.device).clamp(min=1)).float()
        low = -high / 3
        bits = signs.settle(p, high, low, zero_below, residual, runs)
        out = torch.ones(runs.numel)
        both = torch.stack([bits, ~bits])
        signs.add(both, torch.stack([high, low]), torch.stack([low, 2 * high]), out, runs)
        only = signs.gather(values(2), None, runs)
        return [p, largest, high, *signs.sides(p, largest, runs), bits, signs.pack(p, zero_below), residual, out, only]

    one, two = results(), plainly(monkeypatch, results)
    for ours, torchs in zip(one, two, strict=True):
        assert torch.equal(ours, torchs)
    assert bool(torch.isfinite(one[-3]).all())
    assert float(one[0].abs().max()) == LARGEST  # a sum beyond float32 stays in it


@pytest.mark.parametrize("runs", [tensors_of(LAYOUT), columns_of(LAYOUT)], ids=["tensors", "columns"])
def test_sums_are_exact_to_a_billionth_of_the_largest(runs: Runs) -> None:
    p = values(3)
    sums, largest = signs.sides(p, runs.largest(p), runs), runs.largest(p)
    totals = signs.magnitudes(p, largest, runs)
    begin = 0
    for run, length in enumerate(runs.lengths(p.device).tolist()):
        part = p[begin : begin + length].tolist()
        above, below = (math.fsum(abs(x) for x in part if (x < 0) == sign) for sign in (False, True))
        # 2^-30 of the power of two above the largest, and never less than 2^-127
        allowed = max(float(largest[run]) * 2**-30, 2**-127) * length
        assert abs(float(sums.above[run]) - above) <= allowed
        assert abs(float(sums.below[run]) - below) <= allowed
        assert abs(float(totals[run]) - above - below) <= allowed
        assert int(sums.n_below[run]) == sum(x < 0 for x in part)
        begin += length


def test_columns_are_output_units() -> None:
    layout = Layout.of([("weight", (4, 3, 2)), ("bias", (4,)), ("scale", ()), ("empty", (0, 3))])
    assert columns_of(layout).lengths(torch.device("cpu")).tolist() == [6, 6, 6, 6, 4, 1]
    active = torch.tensor([True, False, True, False])
    assert columns_of(layout).active(torch.ones(6), active).tolist() == [1, 1, 1, 1, 0, 1]

"""One bit an element: the machine code has the bits of plain torch, and the means are those of exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.arithmetic import signs
from gradwire.arithmetic.groups import ScaleGroups, columns_of, groups_of
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
        context.setattr(signs, "_machine_code", lambda device: None)
        return function()


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("groups", [groups_of(LAYOUT, None), columns_of(LAYOUT)], ids=["tensors", "columns"])
@pytest.mark.parametrize("zero_below", [False, True])
def test_machine_code_has_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, threads: None, groups: ScaleGroups, zero_below: bool
) -> None:
    def results() -> list[Tensor]:
        p, residual = values(0), values(1)
        largest = signs.gather(p, residual, groups)
        high = (signs.magnitudes(p, largest, groups) / groups.lengths(p.device).clamp(min=1)).float()
        low = -high / 3
        bits = signs.settle(p, high, low, zero_below, residual, groups)
        out = torch.ones(groups.numel)
        both = torch.stack([bits, ~bits])
        signs.add(both, torch.stack([high, low]), torch.stack([low, 2 * high]), out, groups)
        only = signs.gather(values(2), None, groups)
        return [
            p,
            largest,
            high,
            *signs.sides(p, largest, groups),
            bits,
            signs.pack(p, zero_below),
            residual,
            out,
            only,
        ]

    one, two = results(), plainly(monkeypatch, results)
    for ours, torchs in zip(one, two, strict=True):
        assert torch.equal(ours, torchs)
    assert bool(torch.isfinite(one[-3]).all())
    assert float(one[0].abs().max()) == LARGEST  # a sum beyond float32 stays in it


@pytest.mark.parametrize("groups", [groups_of(LAYOUT, None), columns_of(LAYOUT)], ids=["tensors", "columns"])
def test_sums_are_exact_to_a_billionth_of_the_largest(groups: ScaleGroups) -> None:
    p = values(3)
    sums, largest = signs.sides(p, groups.largest(p), groups), groups.largest(p)
    totals = signs.magnitudes(p, largest, groups)
    begin = 0
    for group, length in enumerate(groups.lengths(p.device).tolist()):
        part = p[begin : begin + length].tolist()
        above, below = (math.fsum(abs(x) for x in part if (x < 0) == sign) for sign in (False, True))
        # 2^-30 of the power of two above the largest, and never less than 2^-127
        allowed = max(float(largest[group]) * 2**-30, 2**-127) * length
        assert abs(float(sums.above[group]) - above) <= allowed
        assert abs(float(sums.below[group]) - below) <= allowed
        assert abs(float(totals[group]) - above - below) <= allowed
        assert int(sums.n_below[group]) == sum(x < 0 for x in part)
        begin += length


@pytest.mark.parametrize("groups", [groups_of(LAYOUT, None), groups_of(LAYOUT, 7), columns_of(LAYOUT)])
def test_the_largest_of_each_group(plain_torch: Callable[[], None], threads: None, groups: ScaleGroups) -> None:
    one = groups.largest(values(4))
    plain_torch()
    assert torch.equal(one, groups.largest(values(4)))
    begins, flat = [0, *groups.ends.tolist()], values(4).abs()
    assert one.tolist() == [max(flat[a:b].tolist(), default=0.0) for a, b in pairwise(begins)]


def test_columns_are_output_units() -> None:
    layout = Layout.of([("weight", (4, 3, 2)), ("bias", (4,)), ("scale", ()), ("empty", (0, 3))])
    assert columns_of(layout).lengths(torch.device("cpu")).tolist() == [6, 6, 6, 6, 4, 1]
    active = torch.tensor([True, False, True, False])
    assert columns_of(layout).active(torch.ones(6), active).tolist() == [1, 1, 1, 1, 0, 1]

"""The contract of convolutions, every option by name; only shapes are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from ..contract import Case, Draw, contract, each_batch, tensor

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# one value an axis, all different
KERNEL, STRIDE, DILATION, PADDING = (3, 2, 1), (2, 1, 3), (1, 2, 1), (1, 0, 2)


def images(draw: Draw, batch: int, channels: int, dims: int) -> Any:
    return tensor(draw, batch, channels, *[draw(st.integers(5, 6)) for _ in range(dims)])


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["int", "tuple", "same", "valid"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_plain(dims: int, padding: str, mode: str) -> None:
    given: Any = {"int": 1, "tuple": PADDING[:dims]}.get(padding, padding)
    stride = (1,) * dims if padding == "same" else STRIDE[:dims]

    def make(draw: Draw) -> Case:
        groups = draw(st.sampled_from([1, 2]))
        layer = PLAIN[dims - 1](
            2 * groups,
            3 * groups,
            KERNEL[:dims],
            stride,
            given,
            DILATION[:dims],
            groups,
            draw(st.booleans()),
            mode,
        )
        batch = draw(st.sampled_from([1, 3]))
        return Case(layer, (images(draw, batch, 2 * groups, dims),), batch)

    contract(make, "mean" if dims % 2 else "sum", 3)


@pytest.mark.parametrize("sized", ["nothing", "output_padding", "output_size"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed(dims: int, sized: str) -> None:
    """output_size says in the call what output_padding says in the layer."""
    stride, padding, extra = (2, 3, 2)[:dims], (1, 0, 1)[:dims], (1, 2, 0)[:dims]

    def make(draw: Draw) -> Case:
        groups = draw(st.sampled_from([1, 2]))
        dilation = DILATION[:dims]
        layer = TRANSPOSED[dims - 1](
            2 * groups,
            3 * groups,
            KERNEL[:dims],
            stride,
            padding,
            extra if sized == "output_padding" else 0,
            groups,
            draw(st.booleans()),
            dilation,
        )
        batch = draw(st.sampled_from([1, 3]))
        x = tensor(draw, batch, 2 * groups, *[4, 3, 2][:dims])
        plain = [
            (size - 1) * s - 2 * p + d * (k - 1) + 1
            for size, s, p, d, k in zip(x.shape[2:], stride, padding, dilation, KERNEL, strict=False)
        ]
        size = [a + b for a, b in zip(plain, extra, strict=True)]
        return Case(layer, (x,), batch, kwargs={"output_size": size} if sized == "output_size" else {})

    contract(make, "sum" if dims % 2 else "mean", 3)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_channels_last(kind: Any) -> None:
    def make(draw: Draw) -> Case:
        layer = kind(3, 4, (3, 2)).to(memory_format=torch.channels_last)
        x = images(draw, 3, 3, 2).contiguous(memory_format=torch.channels_last)
        assert not layer.weight.is_contiguous()
        return Case(layer, (x,), 3)

    contract(make, "mean", 2)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("kind", PLAIN + TRANSPOSED)
def test_no_sample_and_one(kind: Any, batch: int) -> None:
    dims = len(kind(1, 1, 1).kernel_size)
    each_batch(lambda draw, batch: Case(kind(2, 3, 2), (images(draw, batch, 2, dims),), batch), batch, "sum")


def test_the_input_may_come_by_name_in_any_place() -> None:
    layer = nn.ConvTranspose2d(3, 2, 3, 2, 1)

    def make(draw: Draw) -> Case:
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        return Case(layer, (), 2, kwargs={"output_size": [8, 8], "input": x})

    contract(make, "sum", 1)

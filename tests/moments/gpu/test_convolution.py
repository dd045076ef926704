"""The fused convolution kernels against float64, sample by sample: in Triton's interpreter, and on a GPU if present."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted
from gradwire.moments.cpu import grad_and_moment as cpu
from gradwire.moments.gpu import choice
from gradwire.moments.grad_and_moment import convolution_function

pytest.importorskip("triton", reason="the fused kernels need Triton")

# name: (samples, channels, (height, width), outputs, kernel, stride, padding, dilation, groups)
CASES: dict[str, tuple[Any, ...]] = {
    "3x3": (3, 16, (6, 5), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": (3, 16, (8, 6), 24, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "odd": (3, 20, (7, 9), 24, (3, 2), (2, 1), (1, 0), (1, 2), 1),
    "pointwise": (5, 33, (4, 4), 17, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "pointwise strided": (3, 16, (6, 6), 16, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "tiny plane": (4, 16, (2, 2), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one position": (4, 16, (1, 1), 16, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "stem": (2, 3, (12, 12), 16, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "colours": (2, 3, (6, 5), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "depthwise": (3, 20, (6, 5), 20, (3, 3), (1, 1), (1, 1), (1, 1), 20),
    "depthwise strided": (2, 70, (9, 10), 70, (5, 3), (2, 1), (2, 1), (1, 1), 70),
    "one column": (2, 16, (6, 1), 16, (3, 1), (1, 1), (1, 0), (1, 1), 1),
    "hopper": (5, 64, (9, 10), 72, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "hopper strided": (3, 128, (12, 10), 136, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "hopper pointwise": (7, 64, (7, 7), 64, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "hopper dilated": (2, 64, (8, 8), 200, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    "one sample": (1, 16, (5, 5), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
}


def problem(name: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, list[int], tuple[Any, ...]]:
    """(output gradient, input, weight shape, geometry): random, of both signs."""
    samples, channels, size, outputs, kernel, stride, padding, dilation, groups = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    shape = [outputs, channels // groups, *kernel]
    x = torch.randn(samples, channels, *size, generator=generator)
    plane = torch.nn.functional.conv2d(x, torch.zeros(shape), None, stride, padding, dilation, groups)
    gradient = torch.randn(plane.shape, generator=generator)
    geometry = (list(stride), list(padding), list(dilation), groups)
    return gradient.to(dtype).to(device), x.to(dtype).to(device), shape, geometry


def named(geometry: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("stride", "padding", "dilation", "groups"), geometry, strict=True))


def truth(gradient: Tensor, x: Tensor, shape: list[int], geometry: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Sum of c_b and of c_b^2, each c_b the float64 weight gradient of one sample alone."""
    weight = torch.zeros(shape, dtype=torch.float64)
    stride, padding, dilation, groups = geometry
    each = torch.stack(
        [
            torch.ops.aten.convolution_backward(
                g[None], one[None], weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
            )[1]
            for g, one in zip(gradient.cpu().double(), x.cpu().double(), strict=True)
        ]
    )
    return each.sum(0), each.square().sum(0)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


def check(name: str, dtype: torch.dtype, device: str, channels_last: bool, tolerance: float) -> None:
    """One case through the operator, in one memory layout."""
    from gradwire.moments.gpu.convolution_moment import launch

    gradient, x, shape, geometry = problem(name, dtype, device)
    wanted = truth(gradient, x, shape, geometry)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    gradient, x = gradient.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    found = launch(gradient, x, torch.Size(shape), named(geometry), torch.float32, channels_last)
    again = found  # the interpreter runs one program after another
    if device == "cuda":
        again = launch(gradient, x, torch.Size(shape), named(geometry), torch.float32, channels_last)
    for one, two, right in zip(found, again, wanted, strict=True):
        assert one.shape == right.shape
        assert one.dtype == torch.float32
        assert one.is_contiguous(memory_format=layout)
        assert error(one, right) <= tolerance, (name, dtype, channels_last, error(one, right))
        assert torch.equal(one, two), f"{name}: two runs on the same inputs differ"


def check_plans(device: str) -> None:
    """Every kind of loop and share, whether a shape's own plan takes it or not."""
    from gradwire.moments.gpu.convolution_moment import shape_of
    from gradwire.moments.gpu.convolution_operands import arranged
    from gradwire.moments.gpu.convolution_plans import TilePlan
    from gradwire.moments.gpu.convolution_tiles import prepare

    plans = [TilePlan(16, 16, 16, 2), TilePlan(16, 16, 16, 2, splits=2), TilePlan(16, 16, 16, 2, parts=2)]
    plans += [TilePlan(16, 16, 16, 2, steps=2), TilePlan(16, 64, 16, 2, parts=1, flat=16)]
    plans += [TilePlan(16, 16, 32, 2, steps=1), TilePlan(16, 64, 16, 2, splits=3, flat=16)]
    gradient, x, shape, (stride, padding, dilation, groups) = problem("3x3", torch.float32, device)
    wanted = truth(gradient, x, shape, (stride, padding, dilation, groups))
    numbers = (*stride, *padding, *dilation, groups)
    sizes = shape_of(gradient.shape, x.shape, torch.Size(shape), numbers)
    for plan in plans:
        for layout in (torch.channels_last, torch.contiguous_format):
            found = tuple(torch.empty(shape).contiguous(memory_format=layout) for _ in range(2))
            ready = prepare(sizes, plan, layout == torch.channels_last, pieces=1, rounded=False)
            ready.run(*arranged(gradient, x, False), found)
            assert max(map(error, found, wanted)) < 1e-6, (plan, layout)


def check_cases(device: str) -> None:
    for name in CASES:
        if name.startswith("hopper"):  # nothing but larger here
            continue
        # float16 products are exact in float32, so the tolerance is float32's; bfloat16 the interpreter cannot multiply
        check(name, torch.float32, device, True, 1e-6)
        check(name, torch.float16, device, False, 1e-6)


INTERPRETED = {"cases": check_cases, "plans": check_plans}


def serve() -> None:
    """Runs in a process of its own: the interpreter is chosen when Triton is imported."""
    from interpreter import mend  # of tests/codec

    mend()
    interpreted.serve(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize("what", INTERPRETED)
def test_interpreted(what: str, interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, what)


def test_a_cpu_is_not_served() -> None:
    x, ones = torch.empty(0), [1, 1]
    geometry = {"groups": 1, "transposed": False, "stride": ones, "padding": ones, "dilation": ones}
    shape = torch.Size((8, 6, 3, 3))
    assert not choice.takes_convolution(x.device, x.dtype, shape, geometry | {"transposed": True})
    assert convolution_function(x.device, x.dtype, shape, geometry) is cpu.convolution


def test_kernel_for_hopper_runs_a_linear_as_a_row_of_positions() -> None:
    from gradwire.moments.gpu.linear_hopper import prepared

    ready = prepared((5, 100, 200, 136), (30000, 300, 1), (13600, 136, 1), 132)
    assert ready.gradient_map == ([5, 1, 100, 200], [30000, 300, 300, 1])
    assert ready.x_map == ([5, 1, 1, 100, 136], [13600, 136, 136, 136, 1])
    assert (ready.boxes.high, ready.boxes.wide, *ready.shape[:5]) == (1, 64, 200, 136, 1, 2, 136)
    assert ready.work[:3] == (2, 2, 5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    # by norm against float64: bfloat16's 8 bits of mantissa give 4e-3 an operand, tf32's and float16's 11 bits 5e-4
    ("dtype", "tolerance", "channels_last"),
    [
        (torch.bfloat16, 1e-2, True),
        (torch.float16, 1e-3, False),
        (torch.float32, 1e-3, True),
        (torch.float32, 1e-3, False),
    ],
    ids=["bfloat16", "float16", "tf32", "tf32-contiguous"],
)
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str, dtype: torch.dtype, tolerance: float, channels_last: bool) -> None:
    check(name, dtype, "cuda", channels_last, tolerance)


if __name__ == "__main__":
    serve()

"""The fused Linear kernels against float64, sample by sample: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted
from gradwire.moments.gpu.choice import linear, linear_by_products, worth_it
from gradwire.moments.gpu.hopper_plans import TileShares, linear_boxes, shares

pytest.importorskip("triton", reason="the fused kernels need Triton")
needs_gpu = pytest.mark.gpu

# B, T, O, I: one of each kind of edge; the last is of more columns of tiles than a band has
FEW = [(4, 1, 20, 30), (6, 3, 20, 31), (1, 1, 5, 4), (5, 6, 33, 17), (2, 2, 128, 130)]
SMALL = [*FEW, (3, 40, 70, 50), (2, 64, 128, 128), (5, 9, 33, 17), (1, 7, 3, 1)]
LARGE = [
    *SMALL,
    (16, 1024, 768, 768),
    (5, 100, 200, 136),
    (40, 16, 256, 128),
    (7, 33, 50, 24),
    (2, 1000, 1500, 768),
    (9, 300, 17000, 136),
    (3, 40, 200, 2500),
]


def problem(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Gradient and input, of both signs, sample b scaled by 1 + b so that a swapped sample shows."""
    samples, positions, outputs, inputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    scale = 1 + torch.arange(samples)[:, None, None] / samples
    gradient = torch.randn(samples, positions, outputs, generator=generator) * scale
    x = torch.randn(samples, positions, inputs, generator=generator)
    return gradient.to(dtype).to(device), x.to(dtype).to(device)


def truth(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """sum_b c_b and sum_b c_b^2 in float64."""
    total = torch.zeros(gradient.shape[2], x.shape[2], dtype=torch.float64, device=x.device)
    squares = total.clone()
    for delta, value in zip(gradient.double(), x.double(), strict=True):
        total += delta.T @ value
        squares += (delta.T @ value).square()
    return total, squares


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check(function: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """One shape: right, and the same twice. Products of halves are exact in float32."""
    gradient, x = problem(shape, dtype, device)
    found, again = (function(gradient, x, torch.float32) for _ in range(2))
    limits = (2e-6, 2e-6) if dtype == torch.float32 else (5e-6, 1e-5)  # of dW and of the moment
    for one, two, wanted, limit in zip(found, again, truth(gradient, x), limits, strict=True):
        assert one.dtype == torch.float32
        assert error(one, wanted) <= limit, (shape, dtype, error(one, wanted))
        assert torch.equal(one, two), f"{shape}: two runs on the same inputs differ"


def check_layouts(function: Any, device: str, dtype: torch.dtype, positions: int, limit: float) -> None:
    """Slices, transposes, other result types, and nothing at all."""
    gradient, x = problem((4, positions, 24, 40), dtype, device)
    wanted = truth(gradient[1:, 2:, 8:], x[1:, 2:, :33])
    assert max(map(error, function(gradient[1:, 2:, 8:], x[1:, 2:, :33], torch.float32), wanted)) < limit
    turned = gradient.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1)
    assert max(map(error, function(*turned, torch.float32), truth(gradient, x))) < limit
    narrow, moment = function(gradient, x, torch.float16)
    assert (narrow.dtype, moment.dtype) == (torch.float16, torch.float32)
    assert error(narrow, truth(gradient, x)[0]) < 1e-3
    nothing = function(gradient[:0], x[:0], torch.float32)
    assert all(part.shape == (24, 40) and not part.any() for part in nothing)


def on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's kernel needs a Hopper GPU")


def check_joining() -> None:
    """Parts laid out as Hopper's kernel leaves them: every tile from `whole` on, in parts of `share` samples."""
    from gradwire.moments.gpu.join_tiles import join_parts

    samples, outputs, inputs = 7, 300, 17 * 128 + 4
    work = TileShares(rows=3, columns=18, samples=samples, whole=2, rest=52, parts=3, share=3)
    each = torch.randn(samples, 3 * 128, 18 * 128)
    bands = (range(16), range(16, 18))
    order = [(row, column) for columns in bands for row in range(3) for column in columns][work.whole :]
    parts = torch.empty(work.parts, work.rest, 2, 128, 128)
    for part, samples_of_it in enumerate(each.split(work.share)):
        for number, (row, column) in enumerate(order):
            tile = samples_of_it[:, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            parts[part, number, 0], parts[part, number, 1] = tile.sum(0), tile.square().sum(0)
    results = torch.full((2, outputs, inputs), torch.nan)
    join_parts(parts, (results[0], results[1]), (outputs, inputs), work, at_once=32)
    wanted = torch.stack([each.sum(0), each.square().sum(0)])[:, :outputs, :inputs]
    assert results[:, :128, :256].isnan().all()  # the whole tiles are not its own
    torch.testing.assert_close(results[:, 128:], wanted[:, 128:])
    torch.testing.assert_close(results[:, :128, 256:], wanted[:, :128, 256:])


def check_samples(device: str) -> None:
    """By products of all samples, also where their room is for a few at a time."""
    from gradwire.moments.gpu.linear_samples import grad_moment

    gradient, x = problem((5, 3, 24, 17), torch.float32, device)
    for workspace in (1 << 20, 2 * 24 * 17, 1):
        found = grad_moment(gradient, x, torch.float32, workspace=workspace)
        assert max(map(error, found, truth(gradient, x))) < (1e-5 if device == "cpu" else 1e-3)
    assert grad_moment(gradient[:0], x[:0], torch.bfloat16)[0].count_nonzero() == 0


def interpret(device: str) -> None:
    """Runs in a process of its own: the interpreter is chosen when Triton is imported."""
    from interpreter import mend  # of tests/codec

    mend()
    for shape in SMALL:
        for dtype in (torch.float32, torch.float16):  # bfloat16 the interpreter cannot multiply
            check(linear_by_products, shape, dtype, device)
    check_layouts(linear_by_products, device, torch.float32, 6, 1e-5)
    check_joining()
    check_samples(device)


def test_interpreted(interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, "all")


@pytest.mark.parametrize("tiles", [1, 36, 108, 131, 132, 133, 144, 256, 1024, 2358])
@pytest.mark.parametrize("samples", [1, 2, 16, 65])
def test_shares_leave_no_tile_and_no_sample_out(tiles: int, samples: int) -> None:
    whole, share = shares(tiles, samples, 1024, 132, 8.0, 16)
    assert 0 <= whole <= tiles
    assert 1 <= share <= samples
    longest = -(-whole // 132) * samples
    if whole < tiles:
        longest += -(-(tiles - whole) * -(-samples // share) // 132) * share
    assert longest <= -(-tiles // 132) * samples  # never longer than without parts


def test_shares_of_measured_shapes() -> None:
    for outputs, inputs, wanted in ((3072, 768, (132, 2)), (4096, 1024, (256, 16))):
        boxes = linear_boxes(16, 1024, outputs, inputs, 132)
        assert (boxes.whole, boxes.share) == wanted


def test_a_cpu_is_not_supported() -> None:
    assert not worth_it(16, 4096, 1024, torch.bfloat16, torch.device("cpu"))


@needs_gpu
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    on_hopper()
    check(linear, shape, dtype, "cuda")


@needs_gpu
def test_layouts_on_gpu() -> None:
    on_hopper()
    check_layouts(linear, "cuda", torch.float16, 10, 1e-5)


@needs_gpu
@pytest.mark.usefixtures("full_precision")
def test_samples_on_gpu() -> None:
    check_samples("cuda")
    for shape in SMALL:
        check(linear_by_products, shape, torch.float32, "cuda")


@needs_gpu
def test_plans_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper()
    from gradwire.moments.gpu import linear_hopper

    shape = (11, 130, 700, 2500)  # 120 tiles in two bands
    gradient, x = problem(shape, torch.bfloat16, "cuda")
    wanted = truth(gradient, x)
    model = linear_boxes(*shape, 132)
    for whole, share, programs in ((120, 11, 132), (0, 4, 132), (0, 1, 7), (8, 3, 4), (30, 11, 1)):
        for stages in (6, 2):
            boxes = replace(model, whole=whole, share=share, programs=programs, stages=stages)
            monkeypatch.setattr(linear_hopper, "linear_boxes", lambda *_, boxes=boxes: boxes)
            linear_hopper.prepared.cache_clear()
            assert max(map(error, linear(gradient, x, torch.float32), wanted)) < 1e-5, boxes
    linear_hopper.prepared.cache_clear()


def test_plans_are_remembered() -> None:
    from gradwire.moments.gpu.linear_hopper import prepared

    strides = ((64 * 128, 128, 1), (64 * 256, 256, 1))
    assert prepared((4, 64, 128, 256), *strides, 132) is prepared((4, 64, 128, 256), *strides, 132)


if __name__ == "__main__":
    interpreted.serve({"all": interpret})

"""The fused Linear kernels against float64, sample by sample: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interpreted
from gradwire.moments.gpu.choice import linear
from gradwire.moments.gpu.linear_plans import LinearPlan, plan_for, worth_it
from gradwire.moments.gpu.tile_shares import shares

pytest.importorskip("triton", reason="the fused kernels need Triton")
needs_gpu = pytest.mark.gpu

# B, T, O, I: one of each kind of edge; up to 6 positions products of rows, which the interpreter runs too
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


def tolerances(positions: int, dtype: torch.dtype) -> tuple[float, float]:
    """(dW, moment). Products of halves are exact in float32; only products of rows are rounded to bfloat16 first."""
    if dtype == torch.float32:
        return 2e-6, 2e-6
    return 5e-6, 1e-2 if positions <= 6 else 1e-5


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """One shape: right, and the same twice."""
    gradient, x = problem(shape, dtype, device)
    found, again = (linear(gradient, x, torch.float32) for _ in range(2))
    limits = tolerances(shape[1], dtype)
    for one, two, wanted, limit in zip(found, again, truth(gradient, x), limits, strict=True):
        assert one.dtype == torch.float32
        assert error(one, wanted) <= limit, (shape, dtype, error(one, wanted))
        assert torch.equal(one, two), f"{shape}: two runs on the same inputs differ"


def check_layouts(device: str, dtype: torch.dtype, positions: int, limit: float) -> None:
    """Slices, transposes, other result types, and nothing at all."""
    gradient, x = problem((4, positions, 24, 40), dtype, device)
    wanted = truth(gradient[1:, 2:, 8:], x[1:, 2:, :33])
    assert max(map(error, linear(gradient[1:, 2:, 8:], x[1:, 2:, :33], torch.float32), wanted)) < limit
    turned = gradient.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1)
    assert max(map(error, linear(*turned, torch.float32), truth(gradient, x))) < limit
    narrow, moment = linear(gradient, x, torch.float16)
    assert (narrow.dtype, moment.dtype) == (torch.float16, torch.float32)
    assert error(narrow, truth(gradient, x)[0]) < 1e-3
    nothing = linear(gradient[:0], x[:0], torch.float32)
    assert all(part.shape == (24, 40) and not part.any() for part in nothing)


def on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's kernel needs a Hopper GPU")


def check_joining() -> None:
    """Parts laid out as Hopper's kernel leaves them: every tile from `whole` on, in parts of `share` samples."""
    from gradwire.moments.gpu.join_tiles import TileCounts, join_parts

    samples, outputs, inputs = 7, 300, 260
    each = torch.randn(samples, 3 * 128, 3 * 128)
    plan = LinearPlan(whole=2, share=3, group=2)
    order = [(row, column) for columns in ((0, 1), (2,)) for row in range(3) for column in columns][plan.whole :]
    parts = torch.empty(3, len(order), 2, 128, 128)
    for part, samples_of_it in enumerate(each.split(plan.share)):
        for number, (row, column) in enumerate(order):
            tile = samples_of_it[:, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            parts[part, number, 0], parts[part, number, 1] = tile.sum(0), tile.square().sum(0)
    results = torch.full((2, outputs, inputs), torch.nan)
    tiles = TileCounts(3, 3, plan.whole, len(order), 3)
    join_parts(parts, (results[0], results[1]), (outputs, inputs), tiles, plan.group, at_once=4)
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
    for shape in FEW:
        for dtype in (torch.float32, torch.float16):  # bfloat16 the interpreter cannot multiply
            check(shape, dtype, device)
    check_layouts(device, torch.float32, 6, 1e-5)
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
        plan = plan_for(16, 1024, outputs, inputs, 132)
        assert (plan.whole, plan.share) == wanted


def test_a_cpu_is_not_supported() -> None:
    assert not worth_it(16, 4096, 1024, torch.bfloat16, torch.device("cpu"))


@needs_gpu
@pytest.mark.usefixtures("full_precision")  # which products of rows follow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for shape in LARGE
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if shape[1] <= 6 or dtype != torch.float32  # more positions in float32 go to products of all samples
    ],
)
def test_on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if shape[1] > 6:
        on_hopper()
    check(shape, dtype, "cuda")


@needs_gpu
def test_layouts_on_gpu() -> None:
    on_hopper()
    check_layouts("cuda", torch.float16, 10, 1e-5)


@needs_gpu
def test_samples_on_gpu() -> None:
    check_samples("cuda")


@needs_gpu
def test_plans_on_gpu() -> None:
    on_hopper()
    from gradwire.moments.gpu.linear_hopper import launch

    shape = (11, 130, 700, 600)
    gradient, x = problem(shape, torch.bfloat16, "cuda")
    wanted = truth(gradient, x)
    model = plan_for(*shape, 132)
    for whole, share, programs in ((30, 11, 132), (0, 4, 132), (0, 1, 7), (8, 3, 4), (30, 11, 1)):
        for group, stages in ((16, 6), (2, 2)):
            plan = replace(model, whole=whole, share=share, programs=programs, group=group, stages=stages)
            assert max(map(error, launch(gradient, x, torch.float32, plan), wanted)) < 1e-5, plan


def test_plans_are_remembered() -> None:
    assert plan_for(4, 64, 128, 128, 132) is plan_for(4, 64, 128, 128, 132)


if __name__ == "__main__":
    interpreted.serve({"all": interpret})

"""The sums of normalizations and biases against float64 plain torch: Numba, Triton in its interpreter and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interpreted
from gradwire.moments import normalization_sums as sums
from gradwire.moments.normalization_sums import channel_sums, normalized_sums, position_sums

needs_gpu = pytest.mark.gpu
EPS = 0.3  # so large that a kernel without it fails
HALVES = (torch.float32, torch.bfloat16, torch.float16)
# B, T, D: one of each kind of edge
ROWS = [(3, 5, 33), (1, 1, 1), (2, 4, 128), (1, 9, 7), (5, 1, 65), (2, 31, 16), (4, 3, 2)]
# B, C, *
CHANNELS = [(3, 4, 5, 7), (1, 2, 3), (2, 6, 1, 2), (4, 36, 3, 3), (5, 2, 2, 3, 2), (2, 4, 33)]


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Gradient, of both signs, and an input away from zero; sample b scaled by 1 + b so that a swapped one shows."""
    generator = torch.Generator().manual_seed(sum(shape))
    scale = (1 + torch.arange(shape[0])).view(-1, *[1] * (len(shape) - 1))
    gradient = torch.randn(shape, generator=generator) * scale
    x = 3 + torch.randn(shape, generator=generator) * scale
    return gradient.to(dtype).to(device), x.to(dtype).to(device)


def strewn(tensor: Tensor) -> Tensor:
    """The same values, every second element of wider rows."""
    room = tensor.new_full((*tensor.shape, 2), torch.nan)
    room[..., 0] = tensor
    return room[..., 0]


def row_truth(gradient: Tensor, x: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """By the definition, in float64."""
    x, gradient = x.double(), gradient.double()
    if centered:
        x = x - x.mean(2, keepdim=True)
    normalized = x / (x.square().mean(2, keepdim=True) + EPS).sqrt()
    return (gradient * normalized).sum(1), gradient.sum(1)


def channel_truth(gradient: Tensor, x: Tensor, groups: int, given: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    x, gradient = x.double(), gradient.double()
    if given is not None:
        normalized = F.batch_norm(x, given[0].double(), given[1].double(), eps=EPS)
    elif groups:
        normalized = F.group_norm(x, groups, eps=EPS)
    else:
        normalized = F.batch_norm(x, None, None, training=True, eps=EPS)
    return [one.flatten(2).sum(2) for one in (gradient * normalized, gradient)]


def agree(found: tuple[Tensor | None, ...], wanted: tuple[Tensor, ...] | list[Tensor], gradient: Tensor) -> None:
    """To float32's rounding of a few ten terms G xhat, xhat up to 10 (in larger samples: of the sum itself)."""
    typical = 1e-5 * float(gradient.double().abs().flatten(1).sum(1).max() / found[0][0].numel())
    for one, two in zip(found, wanted, strict=True):
        assert one is not None
        assert (one.dtype, one.shape) == (torch.float32, two.shape)
        assert float((one.double() - two).abs().max()) <= max(typical, 1e-6 * float(two.abs().max()))


def check_rows(gradient: Tensor, x: Tensor) -> None:
    for centered in (True, False):
        found = normalized_sums(gradient, x, EPS, centered)
        agree(found, row_truth(gradient, x, centered), gradient)
        again = normalized_sums(gradient, x, EPS, centered)
        assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


def check_channels(gradient: Tensor, x: Tensor) -> None:
    channels = x.shape[1]
    running = torch.linspace(-1, 4, channels, device=x.device), torch.linspace(0.5, 2, channels, device=x.device)
    for groups, statistics in ((0, None), (2, None), (channels, None), (0, running)):
        found = channel_sums(gradient, x, EPS, groups, statistics)
        agree(found, channel_truth(gradient, x, groups, statistics), gradient)
    found, again = channel_sums(gradient, x, EPS), channel_sums(gradient, x, EPS)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


def check_layouts(dtype: torch.dtype, device: str) -> None:
    """Samples second, slices, strewn and expanded memory, channels_last, one operand of another dtype or layout."""
    gradient, x = operands((3, 6, 20), dtype, device)
    turned = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in (gradient, x)]
    for left, right in ((turned[0], turned[1]), (gradient, turned[1]), (strewn(gradient), strewn(x))):
        check_rows(left, right)
    check_rows(gradient[1:, 1:, 3:], x[1:, :5, :17])
    check_rows(gradient[:1, :1].expand(3, 6, 20), x)
    check_rows(gradient.float(), x)
    gradient, x = operands((3, 6, 4, 5), dtype, device)
    last = [one.to(memory_format=torch.channels_last) for one in (gradient, x)]
    for left, right in ((last[0], last[1]), (gradient, last[1]), (last[0], x), (strewn(gradient), strewn(x))):
        check_channels(left, right)
    check_channels(gradient[:1, :1, :1, :1].expand(3, 6, 4, 5), x[..., :].float())
    check_channels(gradient.transpose(2, 3), x.transpose(2, 3))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", ROWS)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rows(*operands(shape, dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", CHANNELS)
def test_channels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_channels(*operands(shape, dtype))


def test_layouts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_layouts(dtype, "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_rows(seed: int) -> None:
    shape = np.random.default_rng(seed).integers(1, [6, 21, 71])
    check_rows(*operands(tuple(shape.tolist())))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("last", [True, False])
def test_drawn_channels(seed: int, last: bool) -> None:
    random = np.random.default_rng(seed)
    gradient, x = operands((int(random.integers(2, 6)), int(random.choice([2, 4, 34])), int(random.integers(2, 41))))
    turned = (one.transpose(1, 2).contiguous().transpose(1, 2) if last else one for one in (gradient, x))
    check_channels(*turned)


def test_an_input_far_from_zero() -> None:
    """Squares less a squared mean would leave nothing of a deviation of 1. A mean there is known to 0.0005."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        gradient, x = (one.to(memory_format=memory_format) for one in operands((4, 6, 8, 8)))
        far = x + 10_000
        for groups in (0, 3):
            found, wanted = channel_sums(gradient, far, EPS, groups), channel_truth(gradient, far, groups, None)
            assert float((found[0].double() - wanted[0]).norm() / wanted[0].norm()) < 1e-3


def test_plain_torch_in_float64() -> None:
    gradient, x = operands((3, 5, 7), torch.float64)
    for centered in (True, False):
        found = normalized_sums(gradient, x, EPS, centered)
        torch.testing.assert_close(found, row_truth(gradient, x, centered))
    gradient, x = operands((3, 4, 5, 7), torch.float64)
    for groups in (0, 2, 4):
        torch.testing.assert_close(
            list(channel_sums(gradient, x, EPS, groups)), channel_truth(gradient, x, groups, None)
        )


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 0, 4)])
def test_nothing(shape: tuple[int, ...]) -> None:
    gradient, x = operands(shape)
    for found in normalized_sums(gradient, x, EPS, True):
        assert found is not None
        assert found.shape == (shape[0], 4)
        assert not found.any()
    gradient, x = operands((shape[0], 4, shape[1], 2))
    for found in channel_sums(gradient, x, EPS):
        assert found.shape == (shape[0], 4)
        assert not found.any()


def test_only_what_is_wanted() -> None:
    gradient, x = operands((3, 5, 7))
    assert normalized_sums(gradient, x, EPS, True, want_bias=False)[1] is None
    weight, bias = normalized_sums(gradient, x, EPS, True, want_weight=False)
    assert weight is None
    torch.testing.assert_close(bias, gradient.sum(1))
    assert normalized_sums(gradient, x, EPS, True, False, False) == (None, None)


def test_as_many_threads_as_there_are() -> None:
    """The same bits whatever their number."""
    gradient, x = operands((7, 40, 700))
    rows, planes = normalized_sums(gradient, x, EPS, True), channel_sums(gradient, x, EPS)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if before != 3 else 1)
        again = (*normalized_sums(gradient, x, EPS, True), *channel_sums(gradient, x, EPS))
        assert all(torch.equal(one, two) for one, two in zip((*rows, *planes), again, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
def test_position_sums(dtype: torch.dtype) -> None:
    gradient = operands((3, 4, 5, 6), dtype)[0]
    for positions in ((1, 2), (2, 3), range(1, 3)):
        wanted = gradient.double().sum(tuple(positions))
        found = position_sums(gradient, positions)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(position_sums(gradient[:, :, :1, :1], (2, 3)).double(), gradient[:, :, 0, 0].double())
    assert torch.equal(position_sums(gradient, ()).double(), gradient.double())


def test_what_is_refused() -> None:
    gradient, x = operands((3, 5, 7))
    with pytest.raises(ValueError, match=r"expected gradient and x \[B, T, D\], got \[3, 5, 7\] and \[2, 5, 7\]"):
        normalized_sums(gradient, x[:2], EPS, True)
    with pytest.raises(ValueError, match=r"expected gradient and x \[B, C, \*\], got \[3, 5, 7\] and \[3, 5\]"):
        channel_sums(gradient, x[:, :, 0], EPS)


def interpret(device: str) -> None:
    """Runs in a process of its own: the interpreter is chosen when Triton is imported."""
    from interpreter import mend  # of tests/codec

    from gradwire.moments.gpu import normalization_sums as fused

    mend()
    sums._load = lambda kind: fused  # type: ignore[assignment, return-value]
    for shape in (*ROWS[:3], (2, 40, 600)):
        check_rows(*operands(shape))
    for shape in (*CHANNELS[:2], (2, 4, 1100), (35, 20, 3)):  # several parts, several blocks of samples
        check_channels(*operands(shape))
    for dtype in HALVES[1:]:
        check_rows(*operands(ROWS[0], dtype))
        check_channels(*operands(CHANNELS[1], dtype))
    check_layouts(torch.float32, device)
    test_an_input_far_from_zero()


def test_interpreted(interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, "all")


@needs_gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_on_gpu(dtype: torch.dtype) -> None:
    for shape in (*ROWS, (16, 1024, 768), (3, 50, 8192), (2, 9, 9000), (4, 1000, 33)):
        check_rows(*operands(shape, dtype, "cuda"))
    for shape in (*CHANNELS, (8, 64, 56, 56), (8, 512, 7, 7), (70, 2048, 3, 3)):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            pair = operands(shape, dtype, "cuda")
            if len(shape) == 4:
                pair = tuple(one.to(memory_format=memory_format) for one in pair)
            check_channels(*pair)
    check_layouts(dtype, "cuda")


if __name__ == "__main__":
    interpreted.serve({"all": interpret})

"""FP8 element by element against a search through all codes; machine code against torch; the ends of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import FP8
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods.fp8 import definition as fp8
from methods.test_contract import resealed

SHAPES: list[tuple[int, ...]] = [(33,), (4, 9), (), (0,), (65,), (70, 1001)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
SMALL = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES[:-1]))
FORMATS = pytest.mark.parametrize("format", ["e4m3", "e5m2"])


def gradient(layout: Layout, seed: int) -> Tensor:
    """Down to below the smallest number of both formats, and halfway between two of them."""
    random = np.random.default_rng(seed)
    grad = random.normal(0, 1, layout.numel) * 10.0 ** random.uniform(-9, 0, layout.numel)
    grad[::5] = np.sign(grad[::5]) * random.integers(1, 64, len(grad[::5])) / 64
    grad[::11] = 0
    return torch.tensor(grad, dtype=torch.float32)


def numbers(format: str) -> tuple[list[float], list[int]]:
    """The finite numbers that are not negative, and the last bit of each code, by the paper's definition."""
    n_mantissa, bias, n_codes = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}[format]
    found = []
    for code in range(n_codes):
        exponent, mantissa = code >> n_mantissa, (code & ((1 << n_mantissa) - 1)) / (1 << n_mantissa)
        found.append(mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))
    return found, [code & 1 for code in range(n_codes)]


@FORMATS
def test_every_element_is_the_nearest_number(format: str) -> None:
    known, odd = numbers(format)
    grad = gradient(SMALL, 0)
    mean = InProcess(FP8(format), SMALL)([grad]).mean
    for slot in SMALL:
        part = slot.of(grad).numpy()
        scale = np.float32(np.abs(part).max(initial=0)) / np.float32(known[-1])
        for given, got in zip(part, slot.of(mean).numpy(), strict=True):
            size = float(np.float32(abs(given) / scale)) if given else 0.0
            best = min(range(len(known)), key=lambda code: (abs(known[code] - size), odd[code]))
            assert got == np.float32(np.sign(given) * np.float32(known[best])) * scale


@FORMATS
def test_machine_code_has_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def results() -> list[Tensor]:
        ranks = InProcess(FP8(format), LAYOUT, 3)
        return [ranks([gradient(LAYOUT, 3 * step + rank) for rank in range(3)]).mean for step in range(3)]

    ours = results()
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "numba_ready", lambda device: False)
        torchs = results()
    assert all(torch.equal(one, two) for one, two in zip(ours, torchs, strict=True))


@FORMATS
@pytest.mark.parametrize("size", [torch.finfo(torch.float32).max, 1e38, 1e-30, 1e-36, 1e-37, 1e-40, 1e-45])
def test_the_ends_of_float32(monkeypatch: pytest.MonkeyPatch, format: str, size: float) -> None:
    """The largest goes over to rounding of the scale; of a tensor so small that its scale is not, to a step of it."""
    grad = size * torch.linspace(-1, 1, 33)
    layout = Layout.of([("weight", (33,))])
    done = InProcess(FP8(format), layout)([grad])
    assert done.finite
    assert bool(torch.isfinite(done.mean).all())
    error = (done.mean - grad).abs().max() / size
    assert float(error) <= (0.07 if format == "e4m3" else 0.13) or size < 1e-36
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "numba_ready", lambda device: False)
        assert torch.equal(InProcess(FP8(format), layout)([grad]).mean, done.mean)


@FORMATS
@pytest.mark.parametrize("compiled", [True, False])
def test_a_code_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, format: str, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(fp8, "numba_ready", lambda device: False)
    ranks = InProcess(FP8(format), SMALL)
    context = ranks.context()
    for code in (0x7F, 0xFF) if format == "e4m3" else (0x7C, 0x7D, 0x7F, 0xFC, 0xFF):
        message = FP8(format).encode(gradient(SMALL, 0), torch.empty(0), ranks.states[0], context).data
        message[10 + len(SMALL) :].view(torch.uint8)[17] = code
        resealed(message)
        with pytest.raises(MessageError, match="rank 0 does not hold"):
            FP8(format).decode(message[None], torch.empty(SMALL.numel), context)


@FORMATS
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 3e38, 8e35])
def test_a_scale_that_cannot_be_is_refused(format: str, scale: float) -> None:
    """Also a finite one whose product with the format's largest number is not, whatever the codes are."""
    ranks = InProcess(FP8(format), SMALL)
    context = ranks.context()
    message = FP8(format).encode(gradient(SMALL, 0), torch.empty(0), ranks.states[0], context).data
    message[10] = torch.tensor(scale).view(torch.int32)
    resealed(message)
    with pytest.raises(MessageError, match="rank 0 does not hold"):
        FP8(format).decode(message[None], torch.empty(SMALL.numel), context)


def test_a_byte_an_element_and_a_word_a_tensor() -> None:
    assert FP8().body_words(SMALL) == len(SMALL) + -(-SMALL.numel // 4)


def test_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="e4m3, e5m2, got 'e3m4'"):
        FP8("e3m4")

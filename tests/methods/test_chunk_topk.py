"""ChunkTopK by its definition in Python's own numbers: who is sent, as what, in which bytes; and what is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import ChunkTopK, from_spec
from gradwire.codec import reference
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.chunk_topk import levels, selection
from gradwire.methods.chunk_topk.chunks import Chunks

CPU = torch.device("cpu")
SIZES = [33, 1, 31, 0, 65537, 64, 7, 500]
LAYOUT = Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(SIZES))
METHODS = [ChunkTopK(), ChunkTopK(64, 4), ChunkTopK(100, 7, 3), ChunkTopK(33, 1, 1), ChunkTopK(16, 16), ChunkTopK(1, 1)]
SIGNED_WORD = 1 << 31


def gradient(step: int, layout: Layout = LAYOUT) -> Tensor:
    """Rows of one tensor differ by some decades; some are zeros, some of them nearly all; some numbers come again."""
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(layout.numel, generator=generator)
    grad *= (
        10.0 ** torch.randint(-4, 2, (layout.numel // 64 + 1,), generator=generator).repeat_interleave(64)[: len(grad)]
    )
    grad[:20], grad[200:5000], grad[4000] = grad[:20].round(), 0.0, 1.0
    return grad


@dataclass
class Chunk:
    """One chunk of the oracle."""

    begin: int
    length: int
    places: list[int]  # as they are written
    sent: list[int]  # those of a value
    scale: int = 0


def cut(method: ChunkTopK, residual: list[float]) -> list[list[Chunk]]:
    """The chunks of each tensor, and who is sent: a stable sort of everything."""
    tensors = []
    for slot in LAYOUT:
        chunks = []
        for begin in range(slot.offset, slot.offset + max(slot.numel, 1), method.chunk):
            length = min(method.chunk, slot.offset + slot.numel - begin)
            k = max(1, method.k * length // method.chunk) if length else 0
            order = sorted(range(begin, begin + length), key=lambda i: (-abs(residual[i]), i))[:k]
            sent = sorted(i for i in order if residual[i])
            chunks.append(Chunk(begin, length, sent + [sent[-1] if sent else begin] * (k - len(sent)), sent))
        tensors.append(chunks)
    return tensors


def scale_of(byte: int) -> float:
    """Eight steps an octave, 255 is 1."""
    step = byte + 1
    return (8 + step % 8) / 8 * 2.0 ** (step // 8 - 32) if byte else 0.0


def nearest(ratio: float) -> int:
    """The byte of a scale; half way between two it is the larger."""
    return max(range(256), key=lambda byte: (-abs(scale_of(byte) - ratio), byte)) if ratio >= scale_of(1) else 0


def bounds_of(method: ChunkTopK) -> tuple[float, ...]:
    return {1: (), 2: (1.1,), 3: (0.95, 1.1, 1.35)}[method.bits]


def levels_of(method: ChunkTopK, chunks: list[Chunk], r: list[float]) -> tuple[list[float], dict[int, int]]:
    """Sets the chunks' scales; the levels of their tensor, and which one each place has."""
    means = [math.fsum(abs(r[i]) for i in one.sent) / max(1, len(one.sent)) for one in chunks]
    top = max(means)
    level, sums, weights = {}, [0.0] * method.n_levels, [0.0] * method.n_levels
    for one, mean in zip(chunks, means, strict=True):
        one.scale = nearest(mean / top) if top else 0
        for i in one.sent if one.scale else ():
            unit = scale_of(one.scale) * top
            level[i] = sum(abs(r[i]) > bound * unit for bound in bounds_of(method))
            sums[level[i]] += abs(r[i])
            weights[level[i]] += scale_of(one.scale)
    return [total / weight if weight else 0.0 for total, weight in zip(sums, weights, strict=True)], level


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_element_of_several_steps(method: ChunkTopK) -> None:
    """Places exactly. Values to float32's rounding: a mean within 1e-6 of a bound would show as a whole step."""
    ranks, chunks_of = InProcess(method, LAYOUT), Chunks.of(LAYOUT, method.chunk, method.k)
    for step in range(3):
        r = (ranks.states[0].residual + gradient(step)).tolist()
        tensors = cut(method, r)
        expected = [0.0] * LAYOUT.numel
        for chunks in tensors:
            sizes, level = levels_of(method, chunks, r)
            for one in chunks:
                for i in one.sent if one.scale else ():
                    expected[i] = math.copysign(sizes[level[i]] * scale_of(one.scale), r[i])
        places = [i for chunks in tensors for one in chunks for i in one.places]
        assert selection.select(torch.tensor(r), chunks_of)[0].tolist() == places
        done = ranks([gradient(step)])
        torch.testing.assert_close(done.mean, torch.tensor(expected), rtol=2e-6, atol=0)
        assert expected.count(0.0) < LAYOUT.numel


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compiled_and_plain_take_the_same(monkeypatch: Any, method: ChunkTopK, n_threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    chunks = Chunks.of(LAYOUT, method.chunk, method.k)
    ties = (gradient(0) * 2).round()
    denormal = gradient(1) * 1e-42
    for flat in (
        gradient(2),
        ties,
        denormal,
        torch.zeros(LAYOUT.numel),
        -torch.zeros(LAYOUT.numel),
        torch.ones(LAYOUT.numel),
    ):
        for one, two in zip(selection.select(flat, chunks), selection.largest(flat, chunks), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_bytes_are_the_same_without_a_compiler(plain_torch: Any, method: ChunkTopK) -> None:
    """Both in one test: whatever `plain_torch` takes away, messages and residuals stay."""
    plain = [message_of(method, step) for step in range(2)]
    plain_torch()
    for step, (data, residual) in enumerate(plain):
        again = message_of(method, step)
        assert torch.equal(again[0], data)
        assert torch.equal(again[1], residual)


def message_of(method: ChunkTopK, step: int) -> tuple[Tensor, Tensor]:
    state = method.init(LAYOUT, CPU)
    return method.encode(gradient(step), gradient(step), state, Context(LAYOUT, step)).data, state.residual


@pytest.mark.parametrize("kind", ["gaussian", "laplacian", "rows"])
def test_ten_bits_an_element_that_is_sent(kind: str) -> None:
    """A million elements, head and all; no code of such places takes less than 7.4 bits and 2 of value."""
    layout = Layout.of([("weight", (1024, 1024)), ("bias", (1024,))])
    message = ChunkTopK().encode(drawn(kind, layout.numel), None, ChunkTopK().init(layout, CPU), Context(layout, 0))
    assert message.sent.tolist() == [64 * 256, 16]
    assert 9.4 < 32 * len(message.data) / int(message.sent.sum()) < 10.2


def drawn(kind: str, size: int) -> Tensor:
    torch.manual_seed(0)
    if kind == "laplacian":
        return torch.distributions.Laplace(0.0, 1.0).sample((size,))
    flat = torch.randn(size)
    return flat * torch.randn(-(-size // 512)).exp().repeat_interleave(512)[:size] if kind == "rows" else flat


@pytest.mark.parametrize(
    ("kind", "bits", "least", "most"),
    [
        ("gaussian", 1, 0.011, 0.014),
        ("gaussian", 2, 0.0038, 0.005),
        ("gaussian", 3, 0.001, 0.002),
        ("laplacian", 2, 0.0115, 0.0135),
        ("rows", 1, 0.03, 0.04),
        ("rows", 2, 0.0095, 0.0125),  # by the tensor's two levels alone it would be 0.2
        ("rows", 3, 0.003, 0.005),
    ],
)
def test_the_levels_are_close_to_the_values(kind: str, bits: int, least: float, most: float) -> None:
    """|r - sent|^2 / |r|^2 over what is sent; from what is left when each chunk has the best levels of its own."""
    flat, chunks = drawn(kind, 1 << 20), Chunks.of(Layout.of([("weight", (1 << 20,))]), 4096, 64)
    values = selection.select(flat, chunks)[1]
    said = levels.dequantize(levels.quantize(values, chunks, bits, None), chunks)
    error = float((values - said).square().sum() / values.square().sum())
    assert least < error < most, error


def test_what_is_rounded_off_waits() -> None:
    """Step after step nothing is lost but to rounding, and in the end most of it has arrived."""
    ranks, grad = InProcess(ChunkTopK(64, 4), LAYOUT), gradient(5)
    arrived = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for step in range(1, 61):
        arrived += ranks([grad]).mean
        wanted = step * grad.double()
        lost = (arrived + ranks.states[0].residual - wanted).abs().max()
        assert float(lost) <= step * 2**-23 * float(wanted.abs().max())  # a rounding or two in each step
    left = float((arrived - wanted).norm() / wanted.norm())
    assert 0.01 < left < 0.3, left


def test_undo_gives_the_residual_back() -> None:
    ranks = InProcess(ChunkTopK(64, 4), LAYOUT)
    ranks([gradient(0)])
    before = ranks.states[0].residual.clone()
    done = ranks([gradient(1)])
    assert not torch.equal(ranks.states[0].residual, before + gradient(1))
    done.undo[0]()
    assert torch.equal(ranks.states[0].residual, before + gradient(1))


def test_extremes_are_finite() -> None:
    """The largest numbers and sums beyond them, denormals alone and beside them: all ranks decode numbers."""
    layout = Layout.of([("huge", (100,)), ("tiny", (100,)), ("both", (200,))])
    grad = torch.cat([torch.full((100,), 3e38), torch.full((100,), 1e-45), torch.full((200,), 1e-42)])
    grad[300:] = -3.4e38
    ranks = InProcess(ChunkTopK(100, 5), layout)
    done = ranks([grad])
    assert bool((done.mean[:5] == grad[:5]).all())
    assert not done.mean[100:300].any()  # less than sums can tell from zero, or too far below what else is there
    assert bool((done.mean[300:305] == grad[300:305]).all())
    assert torch.equal(ranks.states[0].residual[100:300], grad[100:300])
    for _ in range(2):  # what waited was near the largest number
        assert bool(torch.isfinite(ranks([grad]).mean).all())
    assert bool(torch.isfinite(ranks.states[0].residual[5:10]).all())


def body_of(*chunk_values: float) -> tuple[ChunkTopK, Context, Tensor]:
    """One tensor of 24 elements in chunks of 8, 2 of each."""
    layout, method = Layout.of([("weight", (24,))]), ChunkTopK(8, 2)
    grad = torch.zeros(24)
    grad[torch.tensor([1, 6, 9, 15, 20])] = torch.tensor(chunk_values)
    context = Context(layout, 0)
    return method, context, method.encode(grad, grad, method.init(layout, CPU), context).data


def test_the_bytes() -> None:
    """Levels 1 and 4 over scales 1, 1 and 1/2; the last chunk has one element, whose place comes twice."""
    _, _, data = body_of(1.0, -4.0, -1.0, 4.0, 1.25)
    low, high, scales, codes, lows, plane = data[10:].tolist()
    assert struct.pack("<2i", low, high) == struct.pack("<2f", 1.3, 4.0)  # (1 + 1 + 1.25) / (1 + 1 + 1 / 2), 8 / 2
    assert scales == 255 | 255 << 8 | 247 << 16
    assert codes == 0b00 | 0b11 << 2 | 0b10 << 4 | 0b01 << 6 | 0b00 << 8
    assert lows == 1 | 2 << 2 | 1 << 4 | 3 << 6 | 0 << 8 | 0 << 10  # two low bits of 1, 6, 1, 7, 4, 4
    assert plane == 0b101 << 0 | 0b101 << 3 | 0b110 << 6  # a bit i + place // 4 of three


def damaged(message: Tensor, index: int, word: int) -> Tensor:
    changed = message.clone()
    changed[index] = word - (word >= SIGNED_WORD) * 2 * SIGNED_WORD
    changed[8:10] = 0
    changed[8:10] = reference.checksum(changed)
    return changed[None]


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (10, 0x7FC00000),  # a level that is no number,
        (11, 0x7F800000),  # infinite
        (10, 0x80000001),  # or below zero
        (15, 0b111101101),  # seven places
        (15, 0b100101101),  # five
        (14, 2 | 2 << 2 | 1 << 4 | 3 << 6 | 1 << 8),  # the last two, one block of four, go back: 5, 4
    ],
)
def test_what_no_worker_sends_is_refused(index: int, word: int) -> None:
    method, context, data = body_of(1.0, -4.0, -1.0, 4.0, 1.25)
    out = torch.full((24,), 3.0)
    with pytest.raises(MessageError, match="does not hold what its method sends"):
        method.decode(damaged(data, index, word), out, context)
    assert (out == 3).all()


def test_a_place_comes_again_only_as_the_last() -> None:
    layout, method = Layout.of([("weight", (16,))]), ChunkTopK(16, 4)
    context, grad = Context(layout, 0), torch.zeros(16)
    grad[torch.tensor([4, 5])] = 1.0
    data = method.encode(grad, grad, method.init(layout, CPU), context).data
    lows, plane = 0 | 1 << 2 | 1 << 4 | 1 << 6, 0b00111100 >> 1  # 4, 5, 5, 5
    assert data[-2:].tolist() == [lows, plane]
    out = torch.zeros(16)
    method.decode(data[None], out, context)
    assert torch.equal(out, grad)
    with pytest.raises(MessageError, match="does not hold what its method sends"):
        method.decode(damaged(data, len(data) - 2, 0 | 0 << 2 | 0 << 4 | 1 << 6), out, context)  # 4, 4, 4, 5


def test_any_scale_and_code_is_a_number() -> None:
    """Nothing else in a body can be wrong: a scale is at most 1."""
    method, context, data = body_of(3e38, -3e38, 1.0, 2.0, 3.0)
    out = torch.empty(24)
    for word in (0xFFFFFFFF, 0, 0x01010101, 0x12345678):
        for index in (12, 13):
            method.decode(damaged(data, index, word), out, context)
            assert bool(torch.isfinite(out).all())


def test_the_spec() -> None:
    assert ChunkTopK() == from_spec("chunk_topk") == from_spec("chunk_topk:chunk=4096,k=64,bits=2")
    assert ChunkTopK().alike


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk": 0}, "chunk must be a whole number in 1 .. 16777216, got 0"),
        ({"chunk": 4096.0}, "chunk must be a whole number"),
        ({"k": 0}, "k must be a whole number in 1 .. 4096, got 0"),
        ({"chunk": 32, "k": 33}, "k must be a whole number in 1 .. 32, got 33"),
        ({"bits": 4}, r"bits must be 1 \(a sign\), 2 or 3, got 4"),
        ({"bits": 0}, "got 0"),
        ({"bits": True}, "got True"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ChunkTopK(**options)

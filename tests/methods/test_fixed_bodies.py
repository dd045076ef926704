"""Format 3 as docs/wire-format.md has it: readers in plain Python, by that page alone, find what decode finds."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from gradwire.exchange.in_process import InProcess
from gradwire.methods import from_spec
from methods.test_contract import LAYOUT, gradient

HEAD = 10
Elements = list[float]


class Bits:
    """A body as one string of bits, read from the front."""

    def __init__(self, words: list[int]) -> None:
        self.words, self.at = words, 0

    def take(self, n_bits: int) -> int:
        value = 0
        for number in range(n_bits):
            word, bit = divmod(self.at + number, 32)
            value |= (self.words[word] >> bit & 1) << number
        self.at += n_bits
        return value

    def float32(self) -> float:
        return struct.unpack("<f", struct.pack("<I", self.take(32)))[0]

    def to_word(self) -> None:
        self.at = -(-self.at // 32) * 32

    def packed(self, n_fields: int, bits: int) -> list[int]:
        fields = []
        for number in range(n_fields):
            if number and number % (32 // bits) == 0:
                self.to_word()
            fields.append(self.take(bits))
        self.to_word()
        return fields


def read_fp8(body: Bits) -> Elements:
    scales = [body.float32() for _ in LAYOUT]
    codes = torch.tensor([body.take(8) for _ in range(LAYOUT.numel)], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double().tolist()
    return [scale * value for scale, value in zip(spread(scales), values, strict=True)]


def spread(values: list[float]) -> Elements:
    return [value for value, slot in zip(values, LAYOUT, strict=True) for _ in range(slot.numel)]


def read_qsgd(body: Bits) -> Elements:
    bits, group = 3, 50
    norms = {(k, i): body.float32() for k, slot in enumerate(LAYOUT) for i in range(-(-slot.numel // group))}
    fields, levels = iter(body.packed(LAYOUT.numel, bits)), 2 ** (bits - 1) - 1
    out = []
    for k, slot in enumerate(LAYOUT):
        for place in range(slot.numel):
            field = next(fields)
            size = norms[k, place // group] * (field & levels) / levels
            out.append(-size if field >> (bits - 1) else size)
    return out


def read_terngrad(body: Bits) -> Elements:
    scales = [body.float32() for _ in LAYOUT]
    trits = []
    for _ in range(-(-LAYOUT.numel // 5)):
        byte = body.take(8)
        trits += [byte // 3**i % 3 for i in range(5)]
    return [scale * (0, 1, -1)[trit] for scale, trit in zip(spread(scales), trits, strict=False)]


def read_onebit(body: Bits) -> Elements:
    columns = [(slot.numel // n, n) for slot in LAYOUT for n in [slot.shape[0] if len(slot.shape) > 1 else 1]]
    lengths = [length for length, n in columns for _ in range(n)]
    above, below = ([body.float32() for _ in lengths] for _ in range(2))
    assert all(value >= 0 for value in above)
    assert all(value <= 0 for value in below)
    fields = iter(body.packed(LAYOUT.numel, 1))
    return [
        (low if next(fields) else high) for high, low, n in zip(above, below, lengths, strict=True) for _ in range(n)
    ]


def read_signs(body: Bits) -> Elements:
    scales = [body.float32() for _ in LAYOUT]
    return [-s if bit else s for s, bit in zip(spread(scales), body.packed(LAYOUT.numel, 1), strict=True)]


def read_votes(body: Bits) -> Elements:
    votes = body.packed(len(LAYOUT), 1)
    return [-v if bit else v for v, bit in zip(spread(votes), body.packed(LAYOUT.numel, 1), strict=True)]


def places(body: Bits, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """pairs: (n, k)."""
    low = [int(math.log2(n / k)) for n, k in pairs]
    lows = [[body.take(bits) for _ in range(k)] for bits, (_, k) in zip(low, pairs, strict=True)]
    body.to_word()
    found = []
    for (n, k), bits, bottom in zip(pairs, low, lows, strict=True):
        plane = [body.take(1) for _ in range(k + ((n - 1) >> bits))]
        ones = [place for place, bit in enumerate(plane) if bit]
        found.append([(one - i) << bits | rest for i, (one, rest) in enumerate(zip(ones, bottom, strict=True))])
    return found


def read_topk(body: Bits) -> Elements:
    counts = [max(1, slot.numel // 16) for slot in LAYOUT]
    values = [[body.float32() for _ in range(k)] for k in counts]
    pairs = [(slot.numel, k) for slot, k in zip(LAYOUT, counts, strict=True)]
    out = [0.0] * LAYOUT.numel
    for slot, own, where in zip(LAYOUT, values, places(body, pairs), strict=True):
        for value, place in zip(own, where, strict=True):
            out[slot.offset + place] += value
    return out


def read_chunks(body: Bits) -> Elements:
    chunk, bits = 50, 3
    begins = [(slot, at) for slot in LAYOUT for at in range(0, slot.numel, chunk)]
    pairs = [(n, max(1, 6 * n // chunk)) for n in (min(chunk, slot.numel - at) for slot, at in begins)]
    levels = {slot.name: [body.float32() for _ in range(4)] for slot in LAYOUT}
    scales = [body.take(8) for _ in begins]
    body.to_word()
    fields = iter(body.packed(sum(k for _, k in pairs), bits))
    own = [[next(fields) for _ in range(k)] for _, k in pairs]
    out = [0.0] * LAYOUT.numel
    for (slot, at), q, codes, where in zip(begins, scales, own, places(body, pairs), strict=True):
        scale = (8 + (q + 1) % 8) / 8 * 2.0 ** ((q + 1) // 8 - 32) if q else 0.0
        for i, (code, place) in enumerate(zip(codes, where, strict=True)):
            if place not in where[:i]:
                out[slot.offset + at + place] = levels[slot.name][code & 3] * scale * (-1 if code & 4 else 1)
    return out


def pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """(begin, length) of each."""
    n = -(-length // chunk)
    sizes = [length // n + (i < length % n) for i in range(n)]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def tiles_of(chunk: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Slot number, width of its matrix, row, column, height and width of every tile, in the order of the body."""
    found = []
    for k, slot in enumerate(LAYOUT):
        n_rows = slot.shape[0] if len(slot.shape) > 1 else 1
        n_columns = slot.numel // n_rows
        for row, height in pieces(n_rows, chunk):
            for column, width in pieces(n_columns, chunk):
                # regions of equal tiles follow each other: the longer rows first, in them the longer columns
                found.append(((height * width, k, -height, -width), (k, n_columns, row, column, height, width)))
    yield from (tile for _, tile in sorted(found, key=lambda one: one[0]))


def cosines(n: int) -> np.ndarray:
    """The orthonormal DCT-II, [frequency, place]."""
    frequency, place = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(math.pi * (place + 0.5) * frequency / n) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def read_cosines(body: Bits) -> Elements:
    out, chunk, most = np.zeros(LAYOUT.numel), 10, 4
    for k, n_columns, row, column, height, width in tiles_of(chunk):
        size, tile = height * width, np.zeros(height * width)
        for _ in range(min(most, size)):
            amplitude = struct.unpack("<f", struct.pack("<I", body.take(16) << 16))[0]
            tile[body.take(math.ceil(math.log2(size)))] = amplitude
        square = cosines(height).T @ tile.reshape(height, width) @ cosines(width)
        slot = LAYOUT.slots[k]
        for i in range(height):
            begin = slot.offset + (row + i) * n_columns + column
            out[begin : begin + width] += square[i]
    return out.tolist()


READERS: dict[str, Callable[[Bits], Elements]] = {
    "fp8": read_fp8,
    "qsgd:bits=3,group=50": read_qsgd,
    "terngrad": read_terngrad,
    "onebit": read_onebit,
    "signsgd": read_signs,
    "signsgd:feedback=false,vote=true": read_votes,
    "topk:density=0.0625,exact=true": read_topk,
    "chunk_topk:chunk=50,k=6,bits=3": read_chunks,
    "momentum_dct:chunk=10,k=4": read_cosines,
}


@pytest.mark.parametrize("spec", READERS)
def test_a_body_is_what_the_page_says(spec):
    ranks = InProcess(from_spec(spec), LAYOUT)
    for step in range(2):
        context = ranks.context()
        message = ranks.compressor.encode(gradient(step), gradient(step).square(), ranks.states[0], context)
        out = torch.empty(LAYOUT.numel)
        ranks.compressor.decode(message.data[None], out, context)
        words = [word & 0xFFFFFFFF for word in message.data.tolist()]
        assert words[1] >> 16 == 3
        body = Bits(words[HEAD:])
        read = READERS[spec](body)
        body.to_word()
        assert body.at == 32 * len(body.words), "nothing is left over"
        torch.testing.assert_close(out.double(), torch.tensor(read, dtype=torch.float64), rtol=1e-5, atol=1e-6)
        assert out.any()
        ranks.number += 1

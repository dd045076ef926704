"""The largest elements of every chunk in a few bits: what SparseLoCo sends (Sarfi et al., arXiv:2508.15706)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.arithmetic.finite import LARGEST, unsound
from gradwire.codec import fields
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.chunk_topk.chunks import Chunks
from gradwire.methods.chunk_topk.levels import BOUNDS, Quantized, dequantize, quantize
from gradwire.methods.chunk_topk.selection import select
from gradwire.methods.fixed import Body, Fixed, split
from gradwire.methods.residual import WithResidual
from gradwire.methods.topk import places
from gradwire.methods.topk.places import Entries

LONGEST = 1 << 24  # elements of a chunk


@dataclass(frozen=True)
class ChunkTopK(WithResidual, Fixed):
    """Sends the k largest |r| of every `chunk` consecutive elements of a tensor, as a sign and a level: r += g.

    sent = sign(r) l s where r is sent, s a scale of the chunk and l one of 2^(bits - 1) levels of the tensor
    (levels.py); r -= sent, so that what the levels round off goes with a later step.

    chunk: consecutive elements that are compared; a tensor's last chunk has n <= chunk.
    k: of `chunk` elements; max(1, floor(k n / chunk)) of n. Zeros are never sent.
    bits: of a value, the sign included: 1, 2 or 3.

    10.1 bits for each element that is sent, of 64 in 4096 in 2 bits: 2 of value, 0.125 of scale, 7.98 of place.
    """

    chunk: int = 4096
    k: int = 64
    bits: int = 2

    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, most in (("chunk", LONGEST), ("k", self.chunk)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"ChunkTopK: {name} must be a whole number in 1 .. {most}, got {value!r}")
        if self.bits not in BOUNDS or isinstance(self.bits, bool):
            raise ValueError(f"ChunkTopK: bits must be 1 (a sign), 2 or 3, got {self.bits!r}")

    @property
    def n_levels(self) -> int:
        """L, of |r|."""
        return 1 << self.bits - 1

    def body_words(self, layout: Layout) -> int:
        chunks = self._chunks(layout)
        return sum(self._lengths(chunks)) + chunks.code.words

    def _chunks(self, layout: Layout) -> Chunks:
        return Chunks.of(layout, self.chunk, self.k)

    def _lengths(self, chunks: Chunks) -> tuple[int, int, int]:
        """Words of the levels, the scales and the codes; places come after them."""
        n_levels = len(chunks.groups.layout) * self.n_levels
        return n_levels, -(-len(chunks.groups) // 4), fields.n_words(chunks.code.n_entries, self.bits)

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        chunks, residual = self._chunks(context.layout), state.residual
        self.accumulate(grad, state, context)
        index, values = select(residual, chunks)
        before = residual[index].clamp_(-LARGEST, LARGEST)  # a sum beyond float32 must not stay there as inf
        said = quantize(values.clamp_(-LARGEST, LARGEST), chunks, self.bits, context.active)
        sent = torch.where(values != 0, dequantize(said, chunks), 0.0)
        residual[index] = before  # a place that stands there again has the same value again
        residual.index_add_(0, index, sent, alpha=-1)

        def undo() -> None:
            residual[index] = before

        words = torch.cat([*self._words_of(said, chunks), places.pack(index, chunks.code)])
        n_sent = chunks.by_tensor.sums(sent != 0)
        return Body(words, sent.abs().sum(), undo, n_sent)

    def _words_of(self, said: Quantized, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
        scales = said.scales.new_zeros(4 * self._lengths(chunks)[1])
        scales[: len(said.scales)] = said.scales
        codes = fields.pack(said.codes.int(), self.bits)
        return said.levels.flatten().view(torch.int32), scales.view(torch.int32), codes

    def read(self, bodies: Tensor, context: Context) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Places and values of each rank."""
        chunks = self._chunks(context.layout)
        levels, rest = split(bodies, self._lengths(chunks)[0])
        entries, said, broken = chunks.code.entries(bodies.device), [], []
        for level, body in zip(levels, rest, strict=True):
            index, values, wrong = self._read(level, body, chunks, entries)
            said.append((index, values))
            broken.append(wrong)
        return said, torch.stack(broken) | unsound(levels)

    def _read(self, levels: Tensor, body: Tensor, chunks: Chunks, entries: Entries) -> tuple[Tensor, Tensor, Tensor]:
        """A place that comes again says nothing; it may only be a chunk's last."""
        _, n_scales, n_codes = self._lengths(chunks)
        scales, codes, rest = body[:n_scales], body[n_scales:][:n_codes], body[n_scales + n_codes :]
        index, wrong = places.unpack(rest, chunks.code, entries)
        steps, firsts = (at.diff(prepend=at.new_full((1,), -1)) for at in (index, entries.offset))
        new, same = steps > 0, firsts == 0  # as the one before: another place, the same chunk
        wrong = wrong | (steps < 0).any() | (new[1:] & ~new[:-1] & same[1:]).any()
        shape, n_entries = (len(chunks.groups.layout), self.n_levels), chunks.code.n_entries
        scale = scales.contiguous().view(torch.uint8)[: len(chunks.groups)]
        code = fields.unpack(codes.contiguous(), self.bits, n_entries).long()
        values = dequantize(Quantized(levels.reshape(shape), scale, code), chunks)
        return index, torch.where(new, values, 0.0), wrong

    def add_all(self, said: list[tuple[Tensor, Tensor]], out: Tensor, context: Context) -> None:
        for index, values in said:
            out.index_add_(0, index, values * (1 / len(said)))

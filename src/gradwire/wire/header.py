"""The head of every message: what it is, of which model and step, and a checksum over all of it.

A message is a vector of int32, little-endian on the wire, of a length that all ranks know:

    0      magic "GRWR"                     4      step, modulo 2^31
    1      format << 16 | version           5      flags: bit 0 all finite
    2, 3   digest of the bucket's layout    6      K tensors
                                            7      C chunks
    8, 9   checksum of all other words
    then   C counts of sent elements, one a chunk of 2^28 places
           K counts of elements that passed, -1 for a tensor without a gradient
           K exponents as bytes, padded to a whole word
           the body: the words of the chunks one after another, zeros up to the capacity
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import MessageError
from gradwire.layout import Layout

MAGIC = int.from_bytes(b"GRWR", "little")
VERSION = 1
FIXED = 10
CHECKSUM = slice(8, 10)


@dataclass(frozen=True)
class Shape:
    """Where the parts of a message lie, for one bucket and one capacity."""

    layout: Layout
    capacity: int
    chunk: int
    format: int

    @property
    def chunks(self) -> int:
        return max(1, -(-self.layout.numel // self.chunk))

    @property
    def counts(self) -> slice:
        return slice(FIXED, FIXED + self.chunks)

    @property
    def passed(self) -> slice:
        return slice(self.counts.stop, self.counts.stop + len(self.layout))

    @property
    def exponents(self) -> slice:
        return slice(self.passed.stop, self.passed.stop + -(-len(self.layout) // 4))

    @property
    def body(self) -> slice:
        return slice(self.exponents.stop, self.words)

    @property
    def words(self) -> int:
        return FIXED + self.chunks + len(self.layout) + -(-len(self.layout) // 4) + self.capacity

    def fixed(self, step: int) -> list[int]:
        """The words 0 to 4, 6 and 7, which are the same on every rank."""
        digest = [int.from_bytes(self.layout.digest[i : i + 4], "little", signed=True) for i in (0, 4)]
        return [MAGIC, self.format << 16 | VERSION, *digest, step % (1 << 31), 0, len(self.layout), self.chunks]


def write(
    shape: Shape, step: int, finite: Tensor, counts: Tensor, passed: Tensor, exponents: Tensor, body: Tensor
) -> Tensor:
    """One whole message, int32 [shape.words]."""
    message = torch.zeros(shape.words, dtype=torch.int32, device=body.device)
    message[:8] = torch.tensor(shape.fixed(step), dtype=torch.int32, device=body.device)
    message[5] = finite.int()
    message[shape.counts] = counts
    message[shape.passed] = passed
    message[shape.exponents].view(torch.int8)[: len(shape.layout)] = exponents.to(torch.int8)
    message[shape.body][: len(body)] = body
    message[CHECKSUM] = checksum(message)
    return message


def checksum(message: Tensor) -> Tensor:
    """sum_i w_i (2 i + 1) modulo 2^64 as two words, over all words but its own: one changed word always shows."""
    words = message.long().clone()
    words[..., CHECKSUM] = 0
    place = torch.arange(message.shape[-1], device=message.device) * 2 + 1
    return (words * place).sum(-1, keepdim=True).view(torch.int32)


def check(messages: Tensor, shape: Shape, step: int) -> None:
    """Refuses messages [W, words] that were cut, changed, or made by another version, model or step."""
    if messages.dtype != torch.int32 or messages.dim() != 2 or messages.shape[1] != shape.words:
        raise MessageError(
            f"expected messages of {shape.words} int32 words, got {tuple(messages.shape)} {messages.dtype}"
        )
    expected = shape.fixed(step)
    for rank, head in enumerate(messages[:, :FIXED].tolist()):
        _check_head(rank, head, expected)
    wrong = (messages[:, CHECKSUM] != checksum(messages)).any(1).nonzero().flatten().tolist()
    if wrong:
        raise MessageError(f"the message of rank {wrong[0]} is corrupt: its checksum does not match")
    counts = messages[:, shape.counts]
    if bool((counts < 0).any()) or bool((counts.long().sum(1) > shape.capacity).any()):
        raise MessageError(f"a message counts more elements than its capacity of {shape.capacity}: {counts.tolist()}")
    if bool((messages[:, shape.passed] < -1).any()):
        raise MessageError("a message has a negative number of passing elements")


def _check_head(rank: int, head: list[int], expected: list[int]) -> None:
    if head[0] != expected[0]:
        raise MessageError(f"rank {rank} sent no gradwire message (it begins with {head[0] & 0xFFFFFFFF:#010x})")
    if head[1] != expected[1]:
        theirs, ours = (f"format {word >> 16} version {word & 0xFFFF}" for word in (head[1], expected[1]))
        raise MessageError(f"rank {rank} sent {theirs}, expected {ours}: install the same gradwire on every rank")
    if head[2:4] != expected[2:4] or head[6:8] != expected[6:8]:
        raise MessageError(f"rank {rank} sent the gradient of another model or bucket: its layout differs")
    if head[4] != expected[4]:
        raise MessageError(f"rank {rank} sent step {head[4]}, this is step {expected[4]}: the ranks are out of step")

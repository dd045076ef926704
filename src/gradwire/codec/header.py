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
           format 2 only: K orders of codes
           the body: format 1 the words of the chunks one after another, format 2 blocks; zeros up to its end

Format 3, for messages of a fixed length, has the ten words and the body alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codec.form import BARE, COMPACT, FIXED, VERSION, WORDS, Shape
from gradwire.errors import MessageError

__all__ = ["BARE", "COMPACT", "FIXED", "VERSION", "WORDS", "WORD_BYTES", "Parts", "Shape", "check"]
__all__ += ["exponents_of", "refuse", "refuse_length", "write"]

WORD_BYTES = 4
CHECKSUM = slice(8, 10)
# of the checksum, which reference.py defines
KEY = 0x9E3779B97F4A7C15  # sets places apart: 2^64 over the golden ratio
MULTIPLIER = 0xD6E8FEB86659FD93  # of a mix after which every bit depends on all others (P. Degski's)


Checksum = Callable[[Tensor], Tensor]  # a kernel's


class Parts(NamedTuple):
    """What a message is made of, beside what all ranks know."""

    finite: Tensor  # bool []
    counts: Tensor  # int32 [C]
    passed: Tensor  # int32 [K]
    exponents: Tensor  # int32 [K]
    orders: Tensor | None  # int32 [K], format 2 only
    body: Tensor  # int32 [shape.room]


def write(shape: Shape, step: int, parts: Parts, checksum: Checksum) -> Tensor:
    """One whole message, int32 [shape.words]."""
    finite, counts, passed, exponents, orders, body = parts
    fixed = torch.tensor([*shape.fixed(step), 0, 0], dtype=torch.int32)
    small = torch.zeros((shape.exponents.stop - shape.exponents.start) * 4, dtype=torch.int8, device=body.device)
    small[: len(exponents)] = exponents.to(torch.int8)
    head = [fixed.to(body.device, non_blocking=True), counts, passed, small.view(torch.int32)]
    message = torch.cat([*head, *([] if orders is None else [orders]), body])
    message[5] = finite
    message[CHECKSUM] = checksum(message)
    return message


def exponents_of(messages: Tensor, shape: Shape) -> Tensor:
    """What the heads [W, words] say: int32 [W, K]."""
    return messages[:, shape.exponents].contiguous().view(torch.int8)[:, : len(shape.layout.slots)].int()


def refuse_length(messages: Tensor, shape: Shape) -> None:
    """Messages that nobody could read."""
    if messages.dtype != torch.int32 or messages.dim() != 2 or messages.shape[1] != shape.words:
        raise MessageError(
            f"expected messages of {shape.words} int32 words, got {tuple(messages.shape)} {messages.dtype}"
        )


def check(messages: Tensor, shape: Shape, step: int, checksum: Checksum) -> Tensor:
    """What is wrong with the messages [W, words]: bool [W, len(PROBLEMS)]. Nothing is waited for."""
    refuse_length(messages, shape)
    fixed = torch.tensor(shape.fixed(step), dtype=torch.int32).to(messages.device, non_blocking=True)
    other = messages[:, :8] != fixed
    counts = messages[:, shape.counts].long()
    return torch.stack(
        [
            other[:, 0],
            other[:, 1],
            other[:, [2, 3, 6, 7]].any(1),
            other[:, 4],
            (checksum(messages) != messages[:, CHECKSUM]).any(1),
            (counts < 0).any(1) | (counts.sum(1) > shape.most),
            (messages[:, shape.passed] < -1).any(1),
        ],
        dim=1,
    )


PROBLEMS = (
    "is no gradwire message",
    "is of another format or version",
    "is the gradient of another model or bucket: its layout differs",
    "is of another step: the ranks are out of step",
    "is corrupt: its checksum does not match",
    "counts more elements than its capacity",
    "has a negative number of passing elements",
)


def refuse(problems: Tensor, names: tuple[str, ...], messages: Tensor, shape: Shape, step: int) -> None:
    """Raises for the first problem [W, len(names)], if there is one, in words."""
    for rank, row in enumerate(problems.tolist()):
        if any(row):
            expected, head = shape.fixed(step), messages[rank, :FIXED].tolist()
            raise MessageError(f"the message of rank {rank} {_in_words(names[row.index(True)], head, expected)}")


def _in_words(problem: str, head: list[int], expected: list[int]) -> str:
    if problem == PROBLEMS[0]:
        return f"{problem} (it begins with {head[0] & 0xFFFFFFFF:#010x})"
    if problem == PROBLEMS[1]:
        theirs, ours = (f"format {word >> 16} version {word & 0xFFFF}" for word in (head[1], expected[1]))
        return f"has {theirs}, expected {ours}: install the same gradwire on every rank"
    if problem == PROBLEMS[3]:
        return f"is of step {head[4]}, this is step {expected[4]}: the ranks are out of step"
    return problem

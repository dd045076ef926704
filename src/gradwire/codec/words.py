"""The paper's words: 32 bits a sent element, bit 31 the sign, 30..28 d, 27..0 the place within its chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.compact_bits import signed, unsigned

PLACE = (1 << 28) - 1


def pack(index: Tensor, code: Tensor, chunk: int) -> Tensor:
    """int64 places and int32 codes to int32 words [n]."""
    return signed((code.long() << 28) | (index % chunk))


def unpack(words: Tensor, counts: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """int32 words, in chunks of `counts`, to int64 places and int32 codes."""
    base = torch.repeat_interleave(torch.arange(len(counts), device=words.device) * chunk, counts.long())
    word = unsigned(words)
    return base + (word & PLACE), (word >> 28).int()


def places(words: Tensor, counts: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Where the words go, and which of them count: how many do is known on the device alone. int64, bool [M]."""
    ends = counts.long().cumsum(0)
    if words.device.type == "cpu":  # nothing is waited for
        words = words[: int(ends[-1])]
    number, index = torch.arange(len(words), device=words.device), (words & PLACE).long()
    if len(ends) > 1:
        index += torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1) * chunk
    return index, number < ends[-1]

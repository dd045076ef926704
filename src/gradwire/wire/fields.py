"""Small numbers in 32-bit words: 32 // bits of them in each, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def n_words(n_fields: int, bits: int) -> int:
    """Words that `pack` makes of n fields."""
    return -(-n_fields // (32 // bits))


def pack(fields: Tensor, bits: int) -> Tensor:
    """Integers [n], each 0 .. 2^bits - 1 -> int32 [n_words]; zeros after the last one."""
    each = 32 // bits
    rows = torch.zeros(n_words(len(fields), bits) * each, dtype=torch.int32, device=fields.device)
    rows[: len(fields)] = fields
    columns = rows.view(-1, each)
    words = columns[:, 0].clone()
    for place in range(1, each):
        words |= columns[:, place] << (bits * place)
    return words


def unpack(words: Tensor, bits: int, n_fields: int) -> Tensor:
    """int32 [n_words] -> int32 [n]."""
    each = 32 // bits
    shifts = torch.arange(0, bits * each, bits, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:n_fields]

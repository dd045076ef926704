"""Small numbers in 32-bit words: 32 // bits of them in each, the first in the lowest bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import numba_ready
from gradwire.compile.threads import SMALL, shared


def n_words(n_fields: int, bits: int) -> int:
    """Words that `pack` makes of n fields."""
    return -(-n_fields // (32 // bits))


def pack(fields: Tensor, bits: int) -> Tensor:
    """Integers [n], each 0 .. 2^bits - 1 -> int32 [n_words]; zeros after the last one."""
    if not numba_ready(fields.device):
        return reference_pack(fields, bits)
    words = torch.zeros(n_words(len(fields), bits), dtype=torch.int32)
    if bits == 1:
        packed = np.packbits(fields.bool().numpy(), bitorder="little")
        words.numpy().view(np.uint8)[: len(packed)] = packed
        return words
    from gradwire.codec.cpu import fields as compiled_fields

    shared(_parts(len(words)), compiled_fields.pack, fields.numpy(), bits, words.numpy())
    return words


def unpack(words: Tensor, bits: int, n_fields: int) -> Tensor:
    """int32 [n_words] -> int32 [n]."""
    if not numba_ready(words.device):
        return reference_unpack(words, bits, n_fields)
    from gradwire.codec.cpu import fields as compiled_fields

    fields = torch.empty(n_fields, dtype=torch.int32)
    shared(_parts(len(words)), compiled_fields.unpack, words.numpy(), bits, fields.numpy())
    return fields


def _parts(size: int) -> list[tuple[int, int]]:
    """Words (begin, end) for each thread that is worth it."""
    n_parts = max(1, min(torch.get_num_threads(), 8 * size // SMALL))
    return [(size * part // n_parts, size * (part + 1) // n_parts) for part in range(n_parts)]


def reference_pack(fields: Tensor, bits: int) -> Tensor:
    """`pack` in plain torch, on any device: the definition."""
    each = 32 // bits
    rows = torch.zeros(n_words(len(fields), bits) * each, dtype=torch.int32, device=fields.device)
    rows[: len(fields)] = fields
    columns = rows.view(-1, each)
    words = columns[:, 0].clone()
    for place in range(1, each):
        words |= columns[:, place] << (bits * place)
    return words


def reference_unpack(words: Tensor, bits: int, n_fields: int) -> Tensor:
    """`unpack` in plain torch, on any device: the definition."""
    each = 32 // bits
    shifts = torch.arange(0, bits * each, bits, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:n_fields]

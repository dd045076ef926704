"""Five numbers of three values in a byte, to the base 3: 3^5 = 243 of 256 bytes mean something."""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 5
PLACES = (1, 3, 9, 27, 81)
TOP = 242  # the largest byte that means something


def n_words(numel: int) -> int:
    """32-bit words of N trits."""
    return -(-numel // (EACH * 4))


def pack(trits: Tensor) -> Tensor:
    """uint8 [N], each 0 .. 2 -> int32 [n_words]; zeros after the last one."""
    columns = trits.new_zeros(n_words(len(trits)) * 4 * EACH)
    columns[: len(trits)] = trits
    columns = columns.view(-1, EACH)
    packed = columns[:, 0].clone()
    for number, place in enumerate(PLACES[1:], 1):
        packed += columns[:, number] * place
    return packed.view(torch.int32)


def unpack(packed: Tensor, numel: int) -> Tensor:
    """Bytes -> uint8 [N]."""
    places = torch.tensor(PLACES, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] // places % 3).flatten()[:numel]

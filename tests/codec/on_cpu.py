"""The compact format by the CPU's machine code, with the functions of gradwire.codec.compact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.codec import CHUNK, words
from gradwire.codec.compact import check_lengths
from gradwire.codec.form import Blocks
from gradwire.errors import MessageError

cpu = pytest.importorskip("gradwire.codec.cpu.codec", reason="Numba is not installed", exc_type=ImportError)


def pack(index: Tensor, code: Tensor, blocks: Blocks, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Elements as one list, or as one for every chunk."""
    counts = torch.bincount(index // chunk, minlength=-(-blocks.layout.numel // chunk))
    return cpu.pack(words.pack(index, code, chunk), counts, torch.empty(0), blocks, chunk)


def unpack(orders: Tensor, body: Tensor, blocks: Blocks, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    check_lengths(orders, body, blocks)
    found, counts, broken = cpu.unpack(orders[None], body[None], torch.ones(1, dtype=torch.bool), blocks, chunk)
    if broken[0]:
        raise MessageError("broken")
    return words.unpack(found[0, : int(counts.sum())], counts[0], chunk)

"""Step 6 for CUDA, and the checksum: launchers of the Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import triton_decode as decoding
from gradwire.kernels.interface import PROBLEMS, Rule
from gradwire.kernels.tiles import Tiles, tiles_of
from gradwire.layout import Layout

CHECKED = 1024  # words that one program looks at
SUMMED, ROUNDS = 1024, 2  # words at a time, and how often
# Places of a tile. H200, 8 messages of 2.7 million words, 2^28 places: 0.304 ms with 2 warps, 0.309 with 4 and 0.324
# with 1; tiles of 4096 or 2048 take 0.306. Sums by atomic additions, in L2, took 0.44.
TILE, WARPS = 8192, 2
ADDED, WRITTEN = 128, 512  # words of a rank and places of a tile at a time
SEARCHED = 32  # tiles
UNFUSED = {"enable_fp_fusion": False}  # a multiply-add rounds once, the reference twice


def check(words: Tensor, counts: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int) -> Tensor:
    """As `reference.check`."""
    found = torch.zeros(len(words), len(PROBLEMS), dtype=torch.uint8, device=words.device)
    if words.numel():
        tiles = tiles_of(layout, words.device, chunk, TILE, 1)
        n_slots, hybrid = len(layout), rule.tau is not None
        inputs = (words, words.stride(0), counts.contiguous(), exponents.contiguous(), tiles.end)
        numbers = (counts.shape[1], chunk, layout.numel, n_slots, n_slots.bit_length())
        grid = (-(-words.shape[1] // CHECKED), len(words))
        decoding.check_kernel[grid](*inputs, found, *numbers, hybrid=hybrid, width=CHECKED, maxnreg=64)
    return found.view(torch.bool)


def add(words: Tensor, counts: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor) -> None:
    """As `reference.add`."""
    tiles, n_ranks = tiles_of(layout, out.device, chunk, TILE, 1), len(words)
    if not tiles.n_tiles:
        return
    starts = _starts(words, counts.contiguous(), tiles, chunk)
    geometry = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin)
    values = (float(np.float32(rule.tau or 0)), 1 / n_ranks, n_ranks, tiles.n_slots)
    decoding.add_kernel[(tiles.n_tiles,)](
        words, words.stride(0), starts, exponents.contiguous(), *geometry, out, *values,
        hybrid=rule.tau is not None, size=TILE, lanes=ADDED, piece=WRITTEN, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip


def _starts(words: Tensor, counts: Tensor, tiles: Tiles, chunk: int) -> Tensor:
    """How many of each rank's words [W, room] come before each tile, and all: int32 [tiles + 1, W]."""
    n_ranks, n_tiles = len(words), tiles.n_tiles
    starts = torch.empty(n_tiles + 1, n_ranks, dtype=torch.int32, device=words.device)
    numbers = (n_ranks, n_tiles, counts.shape[1], chunk, words.shape[1].bit_length())
    decoding.starts_kernel[(n_tiles // SEARCHED + 1, n_ranks)](
        words, words.stride(0), counts, tiles.base, tiles.low, tiles.origin, starts, *numbers,
        width=SEARCHED, num_warps=1,
    )  # fmt: skip
    return starts


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    rows = messages.reshape(-1, messages.shape[-1])
    total = torch.zeros(len(rows), dtype=torch.int64, device=messages.device)
    if rows.numel():
        grid = (-(-rows.shape[1] // (SUMMED * ROUNDS)), len(rows))
        decoding.checksum_kernel[grid](rows, rows.stride(0), rows.shape[1], total, width=SUMMED, rounds=ROUNDS)
    return total.view(*messages.shape[:-1], 1).view(torch.int32)

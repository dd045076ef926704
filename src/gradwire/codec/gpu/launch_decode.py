"""Step 6 for CUDA, and the checksum: launchers of the Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.gpu import check as checking
from gradwire.codec.gpu import decode as decoding
from gradwire.codec.interface import PROBLEMS, Rule
from gradwire.compile.tiles import Tiles, tiles_of
from gradwire.layout import Layout

CHECKED, CHECKING_WARPS = 2048, 4  # words that one program looks at; H200: 0.045 ms, 1024 0.056, 512 0.055
SUMMED, ROUNDS = 1024, 2  # pairs of words at a time, and how often
# Places of a tile. H200, 8 messages of 2.7 million words, 2^28 places: 0.304 ms with 2 warps, 0.309 with 4 and 0.324
# with 1; tiles of 4096 or 2048 take 0.306. Sums by atomic additions, in L2, took 0.44.
TILE, WARPS = 8192, 2
ADDED, WRITTEN = 128, 512  # words of a rank and places of a tile at a time
SEARCHED = 128  # tiles at a time
UNFUSED = {"enable_fp_fusion": False}  # a multiply-add rounds once, the reference twice


def add(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor
) -> Tensor:
    """As `reference.add`."""
    tiles, n_ranks = tiles_of(layout, out.device, chunk, TILE, 1), len(words)
    found = torch.zeros(n_ranks * len(PROBLEMS) + 1, dtype=torch.uint8, device=words.device)
    if tiles.n_tiles:
        exponents = exponents.contiguous()
        starts = _check(words, counts.contiguous(), sound, exponents, tiles, rule, chunk, found)
        places = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin)
        values = (float(np.float32(rule.tau or 0)), 1 / n_ranks, n_ranks, tiles.n_slots)
        decoding.add_kernel[(tiles.n_tiles,)](
            words, words.stride(0), starts, found[-1:], exponents, *places, out, *values,
            hybrid=rule.tau is not None, size=TILE, lanes=ADDED, piece=WRITTEN, num_warps=WARPS, **UNFUSED,
        )  # fmt: skip
    return found[:-1].view(n_ranks, len(PROBLEMS)).view(torch.bool)


def _check(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, tiles: Tiles, rule: Rule, chunk: int, found: Tensor
) -> Tensor:
    """Fills in what is wrong, [W, PROBLEMS], and whether anything is. Returns how many of each rank's words come before
    each tile, and all: int32 [tiles + 1, W], if nothing is wrong."""
    n_ranks, n_tiles = len(words), tiles.n_tiles
    starts = torch.empty(n_tiles + 1, n_ranks, dtype=torch.int32, device=words.device)
    geometry = checking.Geometry(
        tiles.base, tiles.low, tiles.origin, tiles.first_of_slot, tiles.first_of_chunk, tiles.end
    )
    numbers = (n_ranks, n_tiles, counts.shape[1], chunk, tiles.numel, tiles.n_slots, tiles.n_slots.bit_length())
    checking.check_kernel[(max(1, -(-words.shape[1] // CHECKED)), n_ranks)](
        words, words.stride(0), counts, exponents, sound, geometry, found, found[-1:], starts, *numbers,
        hybrid=rule.tau is not None, size=TILE, width=CHECKED, searched=SEARCHED, num_warps=CHECKING_WARPS, maxnreg=64,
    )  # fmt: skip
    return starts


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    rows = messages.reshape(-1, messages.shape[-1])
    total = torch.zeros(len(rows), dtype=torch.int64, device=messages.device)
    if rows.numel():
        n_words = rows.shape[1]
        grid = (-(-n_words // (2 * SUMMED * ROUNDS)), len(rows))
        decoding.checksum_kernel[grid](rows, rows.stride(0), n_words, total, width=SUMMED, rounds=ROUNDS)
    return total.view(*messages.shape[:-1], 1).view(torch.int32)

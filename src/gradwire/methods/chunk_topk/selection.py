"""The k largest of every chunk, ties by place: in plain torch, on any device, the definition of right."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec import numba_ready
from gradwire.methods.chunk_topk.chunks import ChunkRun, Chunks

MAGNITUDE = 0x7FFFFFFF
PLACE = (1 << 32) - 1  # the bits of a key that say where


def select(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """As `largest`, by machine code where there is a compiler for it."""
    if numba_ready(flat.device):
        from gradwire.methods.chunk_topk import cpu

        return cpu.largest(flat, chunks)
    return largest(flat, chunks)


def largest(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Flat places, int64 [E], and values of the k largest |flat| of each chunk, in order of their places.

    Zeros are never sent: where fewer than k are left the last place comes again with the value 0; the first place of a
    chunk of zeros. 12 bytes an element for the time of the call.
    """
    pairs = [_of_run(flat, run) for run in chunks.runs]
    if not pairs:
        return flat.new_zeros(0, dtype=torch.int64), flat.new_zeros(0)
    places, values = zip(*pairs, strict=True)
    return torch.cat(places), torch.cat(values)


def _of_run(flat: Tensor, run: ChunkRun) -> tuple[Tensor, Tensor]:
    rows = flat[run.begin : run.begin + run.rows * run.size].view(run.rows, run.size)
    keys = (rows.view(torch.int32) & MAGNITUDE).long()
    # the size; below it what is larger for an earlier place: no two keys are equal, so every device takes the same
    keys.bitwise_left_shift_(32).bitwise_or_(torch.arange(run.size - 1, -1, -1, device=flat.device))
    keys = keys.topk(run.k, 1, sorted=False).values
    within, there = run.size - 1 - (keys & PLACE), keys > PLACE
    last = torch.where(there, within, 0).amax(1, keepdim=True)
    within = torch.where(there, within, last).sort(1).values
    values = rows.gather(1, within)
    values[:, 1:].masked_fill_(within.diff(dim=1) == 0, 0.0)
    begins = run.begin + run.size * torch.arange(run.rows, device=flat.device)
    return (within + begins[:, None]).flatten(), values.flatten()

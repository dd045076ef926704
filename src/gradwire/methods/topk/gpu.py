"""The largest elements of each tensor for CUDA: the launcher of the Triton kernels. Nothing here waits for the device.

Seven kernels, eight if it is to be exact, whatever the number of tensors. Memory for the time of the call: 6 bytes an
element, since all of them may be candidates, and 24 KiB a tensor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradwire.arithmetic.draws import key_of
from gradwire.arithmetic.shuffle import progression
from gradwire.codec import CHUNK
from gradwire.codec.quota import Quota
from gradwire.compile.tiles import Tiles, on_device, tiles_of
from gradwire.methods.topk import triton_largest as kernels
from gradwire.methods.topk.largest import EXPECTED, FEWEST, RANK, sampled

TILE, PIECE, COLLECTING_WARPS = 32768, 4096, 8  # places of a tile, at most 2^15, and those looked at together
LANES, WARPS = 1024, 8  # candidates looked at together; not fewer than threads
SAMPLED, SAMPLING_WARPS = 4096, 16  # elements of a sample, likewise
LEVELS, BINS, FIELDS = kernels.LEVELS.value, kernels.BINS.value, kernels.FIELDS.value


def largest(flat: Tensor, quota: Quota, step: int, exact: bool, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """As largest.reference.

    If it is to be exact the sample is asked all the same, and where its floor lets too few pass all are collected.
    """
    device, layout = flat.device, quota.layout
    tiles = tiles_of(layout, device, CHUNK, TILE, 1)
    places = torch.empty(quota.total, dtype=torch.int64, device=device)
    values = torch.empty(quota.total, dtype=torch.int32, device=device)
    if tiles.n_tiles:
        bits, table, work = flat.view(torch.int32), quota.table(device), _work(tiles, device)
        cut = kernels.Cut(tiles.base, tiles.low, tiles.high, tiles.slot, tiles.first_of_slot)
        live = tiles.all_live if active is None else active.view(torch.uint8)
        lines = _kept(quota, device) if exact else _lines(quota, step, device)
        grid, common = (tiles.n_tiles,), {"lanes": LANES, "num_warps": WARPS}
        kernels.floor_kernel[(len(layout),)](
            bits, lines, live, table, work, EXPECTED, RANK, FEWEST,
            lanes=SAMPLED, num_warps=SAMPLING_WARPS,
        )  # fmt: skip
        for again in (False, True) if exact else (False,):
            kernels.collect_kernel[grid](
                bits, cut, table, work, again, size=TILE, piece=PIECE, num_warps=COLLECTING_WARPS
            )
        for level in range(LEVELS):
            kernels.tally_kernel[grid](bits, cut, table, work, level, **common)
        kernels.count_kernel[grid](cut, table, work, **common)
        kernels.write_kernel[grid](cut, table, work, places, values, **common)
    return places, values.view(torch.float32)


def _work(tiles: Tiles, device: torch.device) -> kernels.Work:
    n_tensors, n_tiles = tiles.n_slots, tiles.n_tiles

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    zeros = torch.zeros(n_tensors * (LEVELS * BINS + 1), dtype=torch.int32, device=device)
    return kernels.Work(
        floors=empty(n_tensors),
        places=empty(tiles.numel, torch.int16),
        bits=empty(tiles.numel),
        found=empty(n_tiles),
        above=empty(n_tiles),
        equal=empty(n_tiles),
        plan=empty(n_tensors * LEVELS * FIELDS),
        totals=zeros[n_tensors * LEVELS * BINS :],
        histograms=zeros,
    )


def _lines(quota: Quota, step: int, device: torch.device) -> Tensor:
    """int64 [2 K]: the factor and start of each tensor's sample; 0 where there is none."""
    numbers: list[int] = []
    for slot, k in zip(quota.layout, quota.counts, strict=True):
        numbers += _line(step, slot.name, slot.numel) if sampled(k, slot.numel) else (0, 0)
    return on_device(numbers, device)


@functools.lru_cache(maxsize=64)
def _kept(quota: Quota, device: torch.device) -> Tensor:
    """The same in every step, for who is exact whatever the sample: so that a CUDA graph has nothing to copy."""
    return _lines(quota, 0, device)


@functools.lru_cache(maxsize=4096)  # several workers in one process ask for the same
def _line(step: int, name: str, numel: int) -> tuple[int, int]:
    return progression(key_of(0, step, name), numel)

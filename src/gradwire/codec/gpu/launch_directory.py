"""The compact format for CUDA: the blocks of a bucket on the device, and what directories say. Launchers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradwire.codec.compact_blocks import Blocks
from gradwire.codec.gpu import directory as kernels
from gradwire.compile.tiles import on_device

SMALL, ADDED = 256, 1024  # blocks that one program looks at


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def cut_of(blocks: Blocks, device: torch.device) -> tuple[kernels.Cut, Tensor]:
    """The blocks on the device, and the table by tensor that they follow from; see `geometry_kernel`."""
    return _cut(blocks, device, _stream(device))


@functools.lru_cache(maxsize=8)  # `unpack` comes soon after `pack`, and the capacity changes from step to step
def _cut(blocks: Blocks, device: torch.device, stream: int) -> tuple[kernels.Cut, Tensor]:
    """stream: the one that makes them."""
    offsets, numels = ([getattr(slot, name) for slot in blocks.layout] for name in ("offset", "numel"))
    by_tensor = (blocks.entries[:-1], blocks.entry_bits, blocks.lengths, offsets, numels, blocks.capacity)
    tables = on_device([*blocks.first, *(number for row in by_tensor for number in row)], device)
    sizes = (torch.int64, torch.int32, torch.int32, torch.int32, torch.int64, torch.int32)
    cut = kernels.Cut(*(torch.empty(blocks.count, dtype=dtype, device=device) for dtype in sizes))
    if blocks.count:
        numbers = (blocks.count, len(blocks.layout), len(blocks.layout).bit_length())
        kernels.geometry_kernel[(-(-blocks.count // SMALL),)](tables, cut, *numbers, width=SMALL)
    return cut, tables


def ends_of(bodies: Tensor, blocks: Blocks) -> Tensor:
    """Where each payload of each body [W, words] ends, in words from the first payload on: int32 [W, B].

    Ascending, and more than blocks.payload_words where the directory says too much, whatever it says.
    """
    n_ranks, count, device = len(bodies), blocks.count, bodies.device
    ends = torch.empty(n_ranks, count, dtype=torch.int32, device=device)
    if ends.numel():
        grid = (-(-count // ADDED), n_ranks)
        sums = torch.empty(grid[::-1], dtype=torch.int64, device=device)
        inputs = (bodies, bodies.stride(0), cut_of(blocks, device)[0], sums)
        if grid[0] > 1:
            kernels.lengths_kernel[grid](*inputs, count, width=ADDED)
        kernels.ends_kernel[grid](*inputs, ends, count, blocks.payload_words + 1, width=ADDED)
    return ends

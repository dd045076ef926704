"""The compact format of step 6 for CUDA: the launcher of its Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.compact_blocks import Blocks
from gradwire.codec.gpu import unpack as reading
from gradwire.codec.gpu.launch_directory import cut_of, ends_of

PART = 1024  # blocks that one program of `directory` looks at
CHUNKS = 32  # chunks at a time
# 32 programs fit a multiprocessor instead of 28. H200, 8 messages of 2.7 million elements: 0.133 ms instead of 0.140.
READING_REGISTERS = 64


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`; words behind a rank's last are not written."""
    device, n_ranks, count, n_slots = bodies.device, len(bodies), blocks.count, len(blocks.layout)
    n_chunks, room = max(1, -(-blocks.layout.numel // chunk)), sum(blocks.capacity)
    n_parts = max(1, -(-count // PART))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    words, upto, totals = empty(n_ranks, room), empty(n_ranks, count), empty(n_ranks, n_parts)
    counts, wrong = empty(n_ranks, n_chunks), empty(n_ranks, dtype=torch.bool)
    zeros = torch.zeros(n_ranks * (n_chunks + 1), dtype=torch.int32, device=device)
    splits, broken = zeros[n_ranks:], zeros[:n_ranks]
    cut, tables = cut_of(blocks, device)
    ends = ends_of(bodies, blocks)
    message = (bodies, bodies.stride(0), orders, orders.stride(0), ends, cut)
    sizes = (count, n_slots, blocks.directory_words, blocks.entries[-1], blocks.payload_words)
    reading.directory_kernel[(n_parts, n_ranks)](
        *message, upto, totals, broken, *sizes, hybrid=blocks.hybrid, width=PART
    )
    if count:
        by_tensor = (tables, tables[6 * n_slots + 1 :])
        numbers = (count, blocks.directory_words, blocks.words, n_chunks, chunk, room)
        reading.read_kernel[(count, n_ranks)](
            *message, *by_tensor, upto, totals, sound, words, splits, broken, *numbers,
            hybrid=blocks.hybrid, single=n_chunks == 1, part=PART, num_warps=1, maxnreg=READING_REGISTERS,
        )  # fmt: skip
    reading.settle_kernel[(n_ranks,)](splits, sound, broken, counts, wrong, n_chunks, width=CHUNKS, num_warps=1)
    return words, counts, wrong

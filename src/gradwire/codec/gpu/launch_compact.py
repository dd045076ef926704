"""The compact format of step 4 for CUDA: the launcher of its Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.compact_blocks import Blocks
from gradwire.codec.gpu import compact as compacting
from gradwire.codec.gpu.launch_directory import cut_of

# Blocks whose words one program looks for. H200, 65,536 blocks of 410 elements: 31 us with 16 of them and 8 words in a
# step of the search, 41 with 8 and 16 words, 43 with 32 and 16.
FOUND = 16


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`; the words are those of `encode`, and are not checked."""
    device, count, n_slots = words.device, blocks.count, len(blocks.layout)
    group_bits = (count.bit_length() + 1) // 2  # as many groups of blocks as blocks in a group
    n_groups = -(-count >> group_bits)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    zeros, (orders, classes, extras) = empty(blocks.words + n_groups), empty(3, n_slots)
    body, sums = zeros[: blocks.words], zeros[blocks.words :]
    starts, sizes, unary_bits, low_bits = empty(4, count + 1)
    draft = compacting.Draft(starts, sizes, unary_bits, low_bits, sums, group_bits, classes, extras)
    source, cut = compacting.Source(words, counts, len(counts), chunk), cut_of(blocks, device)[0]
    n_programs = max(n_slots, count // FOUND + 1)
    share = -(-len(zeros) // n_programs)
    compacting.prepare_kernel[(n_programs,)](
        source, cut, codes.contiguous(), draft, orders, zeros, count, n_slots, len(zeros), share,
        hybrid=blocks.hybrid, width=FOUND, num_warps=1,
    )  # fmt: skip
    if count:
        inputs = (source, cut, draft, body)
        kind = {"hybrid": blocks.hybrid, "single": len(counts) == 1, "num_warps": 1}
        compacting.survey_kernel[(n_groups << group_bits,)](*inputs, count, n_groups, **kind)
        compacting.write_kernel[(count,)](*inputs, blocks.directory_words, **kind)
    return orders, body

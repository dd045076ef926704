"""The compact format of steps 4 and 6 for CUDA: what its blocks are, a Triton kernel.

B blocks, K tensors.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gradwire.codec.form import Blocks, bounds
from gradwire.compile.tiles import on_device

SMALL = 256  # blocks that one program looks at


class BlockTable(NamedTuple):
    """Of every block: its first place int64 [B], places, tensor, bits of its count, int32 [B]; its entry in the
    directory: first bit int64 [B], bits int32 [B]. Of every tensor: its first block [K + 1], capacity [K], int64."""

    begin: Any
    length: Any
    tensor: Any
    count_bits: Any
    entry: Any
    entry_bits: Any
    first: Any
    capacity: Any


@triton.jit
def floor_log2(value):
    """Of 1 .. 2^25, 0 of 0. A float32 holds these exactly or rounds to its own binade's end, so its exponent is right
    below 2^24; larger ones are halved first."""
    large = value >= 1 << 24
    bits = tl.where(large, value >> 1, value).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(value > 0, (bits >> 23) - 127 + large.to(tl.int32), 0)


@triton.jit
def low_bits(length, count):
    """k = floor(log2((L - c) / c)), 0 where L < 2c."""
    return floor_log2((length - count) // tl.maximum(count, 1))


@triton.jit
def slots_of(index, ends, n_slots, steps):
    """Which tensor each place (or block) is in: how many end at it or before; the last one for those behind it."""
    low, high = tl.zeros_like(index).to(tl.int32), tl.zeros_like(index).to(tl.int32) + n_slots
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        open_ = low < high
        after = open_ & (tl.load(ends + middle, mask=open_, other=0) <= index)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    return tl.minimum(low, n_slots - 1)


@triton.jit(do_not_specialize=["n_blocks", "n_slots", "steps"])
def geometry_kernel(tables, cut, n_blocks, n_slots, steps, width: tl.constexpr):
    """tables int64 [6, K]: first entry, bits of an entry, places of a block, offset, numel, capacity."""
    block = tl.program_id(0) * width + tl.arange(0, width)
    ours = block < n_blocks
    slot = slots_of(block, cut.first + 1, n_slots, steps)
    row = tables + slot
    entry, entry_bits = tl.load(row, mask=ours, other=0), tl.load(row + n_slots, mask=ours, other=0)
    nominal, offset = tl.load(row + 2 * n_slots, mask=ours, other=1), tl.load(row + 3 * n_slots, mask=ours, other=0)
    numel, capacity = tl.load(row + 4 * n_slots, mask=ours, other=0), tl.load(row + 5 * n_slots, mask=ours, other=0)
    number = block - tl.load(cut.first + slot, mask=ours, other=0)
    length = tl.minimum(nominal, numel - number * nominal).to(tl.int32)
    most = tl.minimum(length, capacity).to(tl.int32)
    tl.store(cut.begin + block, offset + number * nominal, mask=ours)
    tl.store(cut.length + block, length, mask=ours)
    tl.store(cut.tensor + block, slot, mask=ours)
    tl.store(cut.count_bits + block, tl.where(most > 1, floor_log2(tl.maximum(most - 1, 1)) + 1, 0), mask=ours)
    tl.store(cut.entry + block, entry + number * entry_bits, mask=ours)
    tl.store(cut.entry_bits + block, entry_bits.to(tl.int32), mask=ours)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def cut_of(blocks: Blocks, device: torch.device) -> BlockTable:
    """The blocks on the device."""
    key = (device, _stream(device))  # the one that makes them
    if key not in blocks.kept:
        blocks.kept[key] = _cut(blocks, device)
    known: BlockTable = blocks.kept[key]
    return known


def _cut(blocks: Blocks, device: torch.device) -> BlockTable:
    offsets, numels = bounds(blocks.layout)
    by_tensor = (blocks.entries[:-1], blocks.entry_bits, blocks.lengths, offsets, numels, blocks.capacity)
    numbers = on_device([*blocks.first, *(number for row in by_tensor for number in row)], device)
    first, tables = numbers.split([len(blocks.first), 6 * len(blocks.layout)])
    sizes = (torch.int64, torch.int32, torch.int32, torch.int32, torch.int64, torch.int32)
    of_blocks = [torch.empty(blocks.count, dtype=dtype, device=device) for dtype in sizes]
    cut = BlockTable(*[*of_blocks, first, tables[5 * len(blocks.layout) :]])
    if blocks.count:
        n_slots = len(blocks.layout)
        grid = (-(-blocks.count // SMALL),)
        geometry_kernel[grid](tables, cut, blocks.count, n_slots, n_slots.bit_length(), width=SMALL)
    return cut

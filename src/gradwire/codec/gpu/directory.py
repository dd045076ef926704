"""The compact format of steps 4 and 6 for CUDA: its blocks and its directory. Triton kernels.

geometry    begin, length, tensor and fields of every block, from a table by tensor
lengths     what directories say: how long the payloads of some blocks are together
ends        where every payload ends

B blocks, K tensors, W ranks.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec.form import Blocks, bounds
from gradwire.compile.tiles import on_device

SMALL, ADDED = 256, 1024  # blocks that one program looks at


class BlockTable(NamedTuple):
    """Of every block: its first place int64 [B], places, tensor, bits of its count, int32 [B]; its entry in the
    directory: first bit int64 [B], bits int32 [B]."""

    begin: Any
    length: Any
    tensor: Any
    count_bits: Any
    entry: Any
    entry_bits: Any


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


@triton.jit(do_not_specialize=["n_blocks", "n_slots", "steps"])
def geometry_kernel(tables, cut, n_blocks, n_slots, steps, width: tl.constexpr):
    """tables int64: the first block of each tensor [K + 1]; its first entry, bits of an entry, places of a block,
    offset, numel, capacity [K] each."""
    block = tl.program_id(0) * width + tl.arange(0, width)
    ours = block < n_blocks
    low, high = tl.zeros((width,), tl.int32), tl.zeros((width,), tl.int32) + n_slots
    for _step in tl.range(0, steps):  # the last tensor whose first block is not behind this one
        middle = (low + high) // 2
        after = (low < high) & (tl.load(tables + middle + 1, mask=ours & (low < high), other=0) <= block)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    slot = tl.where(ours, low, 0)
    row = tables + n_slots + 1 + slot
    entry, entry_bits = tl.load(row, mask=ours, other=0), tl.load(row + n_slots, mask=ours, other=0)
    nominal, offset = tl.load(row + 2 * n_slots, mask=ours, other=1), tl.load(row + 3 * n_slots, mask=ours, other=0)
    numel, capacity = tl.load(row + 4 * n_slots, mask=ours, other=0), tl.load(row + 5 * n_slots, mask=ours, other=0)
    number = block - tl.load(tables + slot, mask=ours, other=0)
    length = tl.minimum(nominal, numel - number * nominal).to(tl.int32)
    most = tl.minimum(length, capacity).to(tl.int32)
    tl.store(cut.begin + block, offset + number * nominal, mask=ours)
    tl.store(cut.length + block, length, mask=ours)
    tl.store(cut.tensor + block, slot, mask=ours)
    tl.store(cut.count_bits + block, tl.where(most > 1, floor_log2(tl.maximum(most - 1, 1)) + 1, 0), mask=ours)
    tl.store(cut.entry + block, entry + number * entry_bits, mask=ours)
    tl.store(cut.entry_bits + block, entry_bits.to(tl.int32), mask=ours)


@triton.jit
def payload_words(body, cut, block, ours):
    """What a body's directory says of some blocks: int64, below 2^31."""
    position, bits = tl.load(cut.entry + block, mask=ours, other=0), tl.load(cut.entry_bits + block, mask=ours, other=0)
    at, shift = position >> 5, position & 31
    low = tl.load(body + at, mask=ours, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(body + at + 1, mask=ours & (shift + bits > 32), other=0).to(tl.int64)
    return ((low | (high << 32)) >> shift) & ((tl.full((), 1, tl.int64) << bits) - 1)


@triton.jit(do_not_specialize=["n_blocks"])
def lengths_kernel(bodies, stride: tl.int64, cut, sums, n_blocks, width: tl.constexpr):
    """Program (`width` blocks, rank): the words of their payloads together, int64 [W, programs]."""
    rank = tl.program_id(1)
    block = tl.program_id(0) * width + tl.arange(0, width)
    length = payload_words(bodies + rank * stride, cut, block, block < n_blocks)
    tl.store(sums + rank * tl.num_programs(0) + tl.program_id(0), tl.sum(length))


@triton.jit(do_not_specialize=["n_blocks", "most"])
def ends_kernel(bodies, stride: tl.int64, cut, sums, ends, n_blocks, most, width: tl.constexpr):
    """Program as in `lengths`, whose sums these are: ends int32 [W, B], none above `most`."""
    rank, group = tl.program_id(1), tl.program_id(0)
    before = tl.zeros((width,), tl.int64)
    for start in tl.range(0, group, width):
        at = start + tl.arange(0, width)
        before += tl.load(sums + rank * tl.num_programs(0) + at, mask=at < group, other=0)
    block = group * width + tl.arange(0, width)
    end = tl.sum(before) + tl.cumsum(payload_words(bodies + rank * stride, cut, block, block < n_blocks))
    tl.store(ends + rank.to(tl.int64) * n_blocks + block, tl.minimum(end, most).to(tl.int32), mask=block < n_blocks)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def cut_of(blocks: Blocks, device: torch.device) -> tuple[BlockTable, Tensor]:
    """The blocks on the device, and the table by tensor that they follow from; see `geometry_kernel`."""
    key = (device, _stream(device))  # the one that makes them
    if key not in blocks.kept:
        blocks.kept[key] = _cut(blocks, device)
    known: tuple[BlockTable, Tensor] = blocks.kept[key]
    return known


def _cut(blocks: Blocks, device: torch.device) -> tuple[BlockTable, Tensor]:
    offsets, numels = bounds(blocks.layout)
    by_tensor = (blocks.entries[:-1], blocks.entry_bits, blocks.lengths, offsets, numels, blocks.capacity)
    tables = on_device([*blocks.first, *(number for row in by_tensor for number in row)], device)
    sizes = (torch.int64, torch.int32, torch.int32, torch.int32, torch.int64, torch.int32)
    cut = BlockTable(*(torch.empty(blocks.count, dtype=dtype, device=device) for dtype in sizes))
    if blocks.count:
        numbers = (blocks.count, len(blocks.layout), len(blocks.layout).bit_length())
        geometry_kernel[(-(-blocks.count // SMALL),)](tables, cut, *numbers, width=SMALL)
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
            lengths_kernel[grid](*inputs, count, width=ADDED)
        ends_kernel[grid](*inputs, ends, count, blocks.payload_words + 1, width=ADDED)
    return ends

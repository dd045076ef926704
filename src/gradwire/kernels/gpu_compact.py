"""The compact format for CUDA: launchers of its Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from gradwire.kernels import triton_compact as compacting
from gradwire.kernels import triton_compact_read as reading
from gradwire.kernels import triton_decode as decoding
from gradwire.kernels.tiles import on_device
from gradwire.wire.compact_blocks import Blocks

# Blocks, words, elements, bits that one program looks at together. H200, 8 messages of 2.6 million elements: reading
# takes 0.63 ms with 256 bits, 0.91 with 512, 1.5 with 1024.
SMALL, SUMMED, PACKED, UNPACKED = 256, 4096, 512, 256
SEARCHED = 128  # pairs of tile and rank


def starts_of(words: Tensor, counts: Tensor, base: Tensor, low: Tensor, origin: Tensor, chunk: int) -> Tensor:
    """How many of each rank's words [W, room] come before the places base + low, ascending [n]: int32 [n + 1, W].

    origin [groups]: where the chunk begins that a place lies in.
    """
    n_ranks, n_tiles = len(words), len(base)
    starts = torch.empty(n_tiles + 1, n_ranks, dtype=torch.int32, device=words.device)
    ranks = 1 << (n_ranks - 1).bit_length()
    width = max(1, SEARCHED // ranks)
    numbers = (n_ranks, n_tiles, counts.shape[1], chunk, words.shape[1].bit_length())
    decoding.starts_kernel[(n_tiles // width + 1,)](
        words, words.stride(0), counts, base, low, origin, starts, *numbers,
        group=n_tiles // len(origin), width=width, ranks=ranks,
    )  # fmt: skip
    return starts


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=8)  # `unpack` comes soon after `pack`, and the capacity changes from step to step
def _cut(blocks: Blocks, device: torch.device, stream: int) -> tuple[compacting.Cut, Tensor]:
    """The blocks on the device, and the table by tensor that they follow from. stream: the one that made them."""
    slots, n_slots, count = blocks.layout.slots, len(blocks.layout), blocks.count
    by_tensor = ([slot.offset for slot in slots], [slot.numel for slot in slots], blocks.capacity)
    tables = on_device([*blocks.first, *blocks.lengths, *itertools.chain(*by_tensor)], device)
    kinds = (torch.int64, torch.int32, torch.int32)
    cut = compacting.Cut(*(torch.empty(count, dtype=kind, device=device) for kind in kinds))
    if count:
        numbers = (count, n_slots, n_slots.bit_length())
        compacting.geometry_kernel[(-(-count // SMALL),)](tables, *cut, *numbers, width=SMALL)
    return cut, tables


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`; the words are those of `encode`, and are not checked."""
    device, count = words.device, blocks.count
    orders = torch.zeros(len(blocks.layout), dtype=torch.int32, device=device)
    body = torch.zeros(blocks.words, dtype=torch.int32, device=device)
    if not blocks.hybrid:
        compacting.order_kernel[(len(orders),)](codes.contiguous(), orders, num_warps=1)
    if not count:
        return orders, body
    cut, _tables = _cut(blocks, device, _stream(device))
    sizes, origin = torch.empty_like(cut.length), cut.begin // chunk * chunk
    starts = starts_of(words[None], counts[None], cut.begin, torch.zeros_like(cut.length), origin, chunk)
    inputs = (words, starts, counts, cut, orders)
    compacting.survey_kernel[(count,)](*inputs, sizes, len(counts), chunk, hybrid=blocks.hybrid, lanes=PACKED)
    ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    numbers = (len(counts), chunk, count)
    compacting.write_kernel[(count,)](*inputs, ends, body, *numbers, hybrid=blocks.hybrid, rows=PACKED // 32)
    return orders, body


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`; words behind a rank's last are not written."""
    device, n_ranks, count = bodies.device, len(bodies), blocks.count
    n_chunks, room = max(1, -(-blocks.layout.numel // chunk)), sum(blocks.capacity)
    words = torch.empty(n_ranks, room, dtype=torch.int32, device=device)
    counts = torch.zeros(n_ranks, n_chunks, dtype=torch.int32, device=device)
    broken = torch.zeros(n_ranks, dtype=torch.uint8, device=device)
    orders = orders.contiguous()
    if orders.numel():
        grid = (orders.shape[1], n_ranks)
        numbers = (orders.stride(0), broken, orders.shape[1])
        compacting.check_orders_kernel[grid](orders, *numbers, hybrid=blocks.hybrid, num_warps=1)
    if not count:
        return words, counts, broken.view(torch.bool) & sound
    cut, tables = _cut(blocks, device, _stream(device))
    found = torch.empty(n_ranks, count, dtype=torch.int32, device=device)
    body = (bodies, bodies.stride(0))
    grid = (-(-count // SMALL), n_ranks)
    compacting.directory_kernel[grid](*body, cut, found, broken, count, blocks.payload_words, width=SMALL)
    grid = (-(-blocks.words // SUMMED), n_ranks)
    compacting.tail_kernel[grid](*body, broken, count, blocks.words, width=SUMMED)
    starts = torch.cumsum(found, 1, dtype=torch.int32)
    n_slots = len(blocks.layout)
    before = torch.nn.functional.pad(starts.long(), (1, 0))[:, tables[: n_slots + 1]]
    full = (before.diff(dim=1) > tables[4 * n_slots + 1 :]).any(1)
    refused = (broken.view(torch.bool) | full | ~sound).to(torch.uint8)
    reading.read_kernel[(count, n_ranks)](
        *body, orders, orders.stride(0), cut, found, starts, words, counts, refused, broken,
        count, n_chunks, chunk, room, hybrid=blocks.hybrid, lanes=UNPACKED,
    )  # fmt: skip
    wrong = (broken.view(torch.bool) | full) & sound
    return words, torch.where((wrong | ~sound)[:, None], 0, counts), wrong

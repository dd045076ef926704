"""The compact format of step 6 for CUDA: bodies to words. payload.py has what a block's program does.

    lengths     how long the payloads of some blocks are together
    directory   where every payload ends, and how many elements it says it has; what is wrong with orders and directory
    read        the words, one warp a block; what is wrong with payloads and behind them
    settle      elements by chunk, and none of a message that is not right

B blocks, K tensors, W ranks, C chunks.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec.form import Blocks
from gradwire.codec.gpu.blocks import cut_of
from gradwire.codec.gpu.payload import WARP, read_payload

PART = 1024  # blocks that one program of `lengths` and `directory` looks at
CHUNKS = 32  # chunks at a time
# 32 programs fit a multiprocessor instead of 28. H200, 8 messages of 2.7 million elements: 0.133 ms instead of 0.140.
READING_REGISTERS = 64

FAR = tl.constexpr((1 << 63) - 1)  # behind all places


@triton.jit
def payload_words(body, cut, block, ours):
    """What a body's directory says of some blocks: int64, below 2^31."""
    position, bits = tl.load(cut.entry + block, mask=ours, other=0), tl.load(cut.entry_bits + block, mask=ours, other=0)
    at, shift = position >> 5, position & 31
    low = tl.load(body + at, mask=ours, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(body + at + 1, mask=ours & (shift + bits > 32), other=0).to(tl.int64)
    return ((low | (high << 32)) >> shift) & ((tl.full((), 1, tl.int64) << bits) - 1)


@triton.jit(do_not_specialize=["n_blocks"])
def lengths_kernel(bodies, stride: tl.int64, cut, lengths, n_blocks, width: tl.constexpr):
    """Program (part of the blocks, rank): the words of their payloads together, int64 [W, parts]."""
    rank = tl.program_id(1)
    block = tl.program_id(0) * width + tl.arange(0, width)
    length = payload_words(bodies + rank * stride, cut, block, block < n_blocks)
    tl.store(lengths + rank * tl.num_programs(0) + tl.program_id(0), tl.sum(length))


@triton.jit
def check_orders(orders, first, step, n_slots, hybrid: tl.constexpr, width: tl.constexpr):
    """Whether each is a permutation and a shape bit, with tau 0."""
    bad = tl.zeros((width,), tl.int1)
    for start in tl.range(first, n_slots, step):
        slot = start + tl.arange(0, width)
        order = tl.load(orders + slot, mask=slot < n_slots, other=0)
        wrong = order != 0
        if not hybrid:
            seen = slot * 0
            for symbol in tl.static_range(8):
                seen |= 1 << ((order >> (3 * symbol)) & 7)
            wrong = (seen != 255) | ((order >> 25) != 0)
        bad |= wrong & (slot < n_slots)
    return tl.max(bad.to(tl.int32)) == 0


@triton.jit(do_not_specialize=["n_blocks", "n_slots", "n_directory", "n_entry_bits", "n_payload"])
def directory_kernel(
    bodies, stride: tl.int64, orders, orders_stride: tl.int64, ends, cut, lengths, upto, totals, broken,
    n_blocks, n_slots, n_directory, n_entry_bits, n_payload, hybrid: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program (part of the blocks, rank): elements of the part up to each block's end [W, B], and of each part.

    ends int32 [W, B], in words from the first payload on: they ascend whatever the directory says, and are more than
    n_payload where it says too much.
    """
    part, rank = tl.program_id(0), tl.program_id(1)
    n_parts = tl.num_programs(0)
    body, row = bodies + rank * stride, rank.to(tl.int64) * n_blocks
    before = tl.zeros((width,), tl.int64)
    for start in tl.range(0, part, width):
        at = start + tl.arange(0, width)
        before += tl.load(lengths + rank * n_parts + at, mask=at < part, other=0)
    block = part * width + tl.arange(0, width)
    ours = block < n_blocks
    length = payload_words(body, cut, block, ours)
    end = tl.sum(before) + tl.cumsum(length)
    tl.store(ends + row + block, tl.minimum(end, n_payload + 1).to(tl.int32), mask=ours)
    filled = ours & (length > 0) & (end <= n_payload)
    word = tl.load(body + n_directory + end - length, mask=filled, other=0)
    bits = tl.load(cut.count_bits + block, mask=ours, other=0)
    count = tl.where(filled, (word & ((1 << bits) - 1)) + 1, 0)
    wrong = ours & ((end > n_payload) | (count > tl.load(cut.length + block, mask=ours, other=0)))
    count = tl.where(wrong, 0, count)
    tl.store(upto + row + block, tl.cumsum(count), mask=ours)
    tl.store(totals + rank * n_parts + part, tl.sum(count))
    good = tl.max(wrong.to(tl.int32)) == 0
    good &= check_orders(orders + rank * orders_stride, part * width, n_parts * width, n_slots, hybrid, width)
    if part == 0:
        last = tl.load(body + n_directory - 1, mask=n_directory > 0, other=0).to(tl.uint32, bitcast=True)
        used = n_entry_bits - (n_directory - 1) * 32
        good &= (last.to(tl.uint64) >> used.to(tl.uint64)) == 0
    if not good:
        tl.store(broken + rank, 1)


@triton.jit
def elements_before(upto, totals, block, part: tl.constexpr):
    """Of one rank, in the blocks before this one."""
    n_parts, total = block // part, 0
    for start in tl.range(0, n_parts, WARP):
        at = start + tl.arange(0, WARP)
        total += tl.sum(tl.load(totals + at, mask=at < n_parts, other=0))
    return total + tl.load(upto + block - 1, mask=block % part != 0, other=0)


@triton.jit
def split_outside(splits, block, begin, length, following, start, count, n_chunks, chunk):
    """Elements before the borders of chunks between this block's begin and the next one's, but for those inside it."""
    for border in tl.range(0, n_chunks):
        place = (border + 1) * (tl.zeros((), tl.int64) + chunk)
        if ((block == 0) | (place >= begin)) & (place < following):
            before = start + tl.where(place >= begin + length, count, 0)
            tl.atomic_add(splits + border, before, sem="relaxed")


@triton.jit
def are_zeros(body, first, step, n_body):
    """Some words of the body: WARP from `first` on, and after every `step`."""
    good = True
    for start in tl.range(first, n_body, step):
        at = start + tl.arange(0, WARP)
        good &= tl.max((tl.load(body + at, mask=at < n_body, other=0) != 0).to(tl.int32)) == 0
    return good


@triton.jit(do_not_specialize=["n_blocks", "n_directory", "n_body", "n_chunks", "chunk", "room"])
def read_kernel(
    bodies, stride: tl.int64, orders, orders_stride: tl.int64, ends, cut, upto, totals, sound,
    words, splits, broken, n_blocks, n_directory, n_body, n_chunks, chunk, room,
    hybrid: tl.constexpr, single: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Program (block, rank): its words. splits int32 [W, C]: elements up to the end of each chunk."""
    block, rank = tl.program_id(0), tl.program_id(1)
    if tl.load(sound + rank) != 0:
        body, its_splits, row = bodies + rank * stride, splits + rank * n_chunks, rank.to(tl.int64) * n_blocks
        its_ends, its_upto, its_totals = ends + row, upto + row, totals + rank * ((n_blocks + part - 1) // part)
        start = elements_before(its_upto, its_totals, block, part)
        count = tl.load(its_upto + block) - tl.load(its_upto + block - 1, mask=block % part != 0, other=0)
        slot, length, begin = tl.load(cut.tensor + block), tl.load(cut.length + block), tl.load(cut.begin + block)
        good = True
        if block + 1 == tl.load(cut.first + slot + 1):
            before = elements_before(its_upto, its_totals, tl.load(cut.first + slot).to(tl.int32), part)
            good = start + count - before <= tl.load(cut.capacity + slot)
        following = tl.load(cut.begin + block + 1, mask=block + 1 < n_blocks, other=FAR)
        split_outside(its_splits, block, begin, length, following, start, count, n_chunks, chunk)
        number, origin, n_inside = 0, begin.to(tl.int32), 0  # its chunk, where in it, and borders inside
        if not single:
            number = (begin // chunk).to(tl.int32)
            origin = (begin - number * (tl.zeros((), tl.int64) + chunk)).to(tl.int32)
            n_inside = (origin + length - 1) // chunk
        if count > 0:
            at = tl.load(its_ends + block - 1, mask=block > 0, other=0)
            n_words = tl.load(its_ends + block) - at
            order, low = tl.load(orders + rank * orders_stride + slot), tl.load(cut.count_bits + block)
            good &= read_payload(
                body + n_directory + at, n_words, low, count, length, order, words + rank.to(tl.int64) * room, start,
                room, origin, n_inside, chunk, its_splits + number, hybrid, single,
            )  # fmt: skip
        behind = n_directory + tl.load(its_ends + n_blocks - 1)
        good &= are_zeros(body, behind + block * WARP, n_blocks * WARP, n_body)
        if not good:
            tl.store(broken + rank, 1)


@triton.jit(do_not_specialize=["n_chunks"])
def settle_kernel(splits, sound, broken, counts, wrong, n_chunks, width: tl.constexpr):
    """Program: a rank. counts int32 [W, C], zeros where nothing is to be used; wrong: sound, but broken."""
    rank = tl.program_id(0)
    is_sound, is_broken = tl.load(sound + rank) != 0, tl.load(broken + rank) != 0
    tl.store(wrong + rank, (is_sound & is_broken).to(tl.uint8))
    for start in tl.range(0, n_chunks, width):
        number = start + tl.arange(0, width)
        upto = tl.load(splits + rank * n_chunks + number, mask=number < n_chunks, other=0)
        before = tl.load(splits + rank * n_chunks + number - 1, mask=(number > 0) & (number < n_chunks), other=0)
        count = tl.where(is_sound & (is_broken == 0), upto - before, 0)
        tl.store(counts + rank * n_chunks + number, count, mask=number < n_chunks)


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`; words behind a rank's last are not written."""
    device, n_ranks, count, n_slots = bodies.device, len(bodies), blocks.count, len(blocks.layout)
    n_chunks, room = max(1, -(-blocks.layout.numel // chunk)), sum(blocks.capacity)
    n_parts = max(1, -(-count // PART))
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    words, ends, upto, totals = (empty(n_ranks, size) for size in (room, count, count, n_parts))
    lengths = empty(n_ranks, n_parts, dtype=torch.int64)
    counts, wrong = empty(n_ranks, n_chunks), empty(n_ranks, dtype=torch.bool)
    zeros = torch.zeros(n_ranks * (n_chunks + 1), dtype=torch.int32, device=device)
    splits, broken = zeros[n_ranks:], zeros[:n_ranks]
    cut = cut_of(blocks, device)
    if n_parts > 1:
        lengths_kernel[(n_parts, n_ranks)](bodies, bodies.stride(0), cut, lengths, count, width=PART)
    message = (bodies, bodies.stride(0), orders, orders.stride(0), ends, cut)
    sizes = (count, n_slots, blocks.directory_words, blocks.entries[-1], blocks.payload_words)
    directory_kernel[(n_parts, n_ranks)](
        *message, lengths, upto, totals, broken, *sizes, hybrid=blocks.hybrid, width=PART
    )
    if count:
        numbers = (count, blocks.directory_words, blocks.words, n_chunks, chunk, room)
        read_kernel[(count, n_ranks)](
            *message, upto, totals, sound, words, splits, broken, *numbers,
            hybrid=blocks.hybrid, single=n_chunks == 1, part=PART, num_warps=1, maxnreg=READING_REGISTERS,
        )  # fmt: skip
    settle_kernel[(n_ranks,)](splits, sound, broken, counts, wrong, n_chunks, width=CHUNKS, num_warps=1)
    return words, counts, wrong

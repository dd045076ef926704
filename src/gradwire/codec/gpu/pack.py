"""The compact format of step 4 for CUDA: words to a body, by Triton kernels; docs/wire-format.md has the bytes.

    prepare     zeros; per tensor the order of its codes; per block where its words begin
    survey      one warp a block: how long its payload is; its entry in the directory
    write       one warp a block: its payload. A lane joins the fields of neighbours in registers, then ors them in

B blocks, K tensors. Bit positions are counted from the start of a payload.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator,assignment"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec.form import Blocks
from gradwire.codec.gpu.blocks import cut_of, low_bits

PLACE = tl.constexpr((1 << 28) - 1)
SKEWED = tl.constexpr(1 << 24)
WARP, ROW = tl.constexpr(32), tl.constexpr(8)  # lanes of a program, and neighbours that each looks at in one go
HALF = tl.constexpr(4)  # of those: their low bits, or their gaps in unary, nearly always fit one field of 32 bits
FAN = tl.constexpr(8)  # parts that a step of a search tells apart
CLEARED, SUMMED = tl.constexpr(1024), tl.constexpr(256)  # words cleared, numbers added up in one go
# Blocks whose words one program looks for. H200, 65,536 blocks of 410 elements: 31 us with 16 of them and 8 words in a
# step of the search, 41 with 8 and 16 words, 43 with 32 and 16.
FOUND = 16


class WordSource(NamedTuple):
    """Words, how many of them each chunk has, int32 [C]; C, and the places of a chunk."""

    words: Any
    counts: Any
    n_chunks: Any
    chunk: Any


class Draft(NamedTuple):
    """What the kernels tell each other, int32.

    Of every block: where its words begin [B + 1]; the words of its payload, the bits of its unary plane, k. Of every
    2^group_bits blocks: the words of their payloads together. Of every tensor: what each d becomes, in four bits a d:
    its class << 1; its extra bits and their number << 2.
    """

    starts: Any
    sizes: Any
    unary_bits: Any
    low_bits: Any
    sums: Any
    group_bits: Any
    classes: Any
    extras: Any


@triton.jit
def choose_order(codes, orders, draft, slot):
    """One tensor's order: d by falling frequency, ties the smaller first; skewed where that is strictly cheaper."""
    own, other = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    mine, theirs = tl.load(codes + slot * 8 + own), tl.load(codes + slot * 8 + other)
    symbol = tl.sum(((theirs > mine) | ((theirs == mine) & (other < own))).to(tl.int32), axis=1)
    d, often = tl.arange(0, 8), tl.load(codes + slot * 8 + tl.arange(0, 8)).to(tl.int64)
    skewed_bits = tl.where(symbol < 2, 0, tl.where(symbol < 4, 1, 2))
    skewed = tl.sum(often * skewed_bits) < tl.sum(often)
    kind = tl.where(skewed, tl.where(symbol < 4, tl.minimum(symbol, 2), 3), symbol >> 1)
    first = tl.where(skewed, tl.where(kind < 3, kind, 4), kind * 2)
    width = tl.where(skewed, skewed_bits, 1)
    tl.store(orders + slot, tl.sum(d << (3 * symbol)) | tl.where(skewed, SKEWED, 0))
    tl.store(draft.classes + slot, tl.sum((kind << 1) << (4 * d)))
    tl.store(draft.extras + slot, tl.sum(((symbol - first) | (width << 2)) << (4 * d)))


@triton.jit
def find_starts(source, cut, block, n_blocks):
    """How many words come before each block; all of them before block B. Each step of the search loads FAN words."""
    ours = block < n_blocks
    place = tl.load(cut.begin + block, mask=ours, other=0)
    its_chunk = (place // source.chunk).to(tl.int32)
    place = (place % source.chunk).to(tl.int32)[:, None]
    begin, end, stop = block * 0, block * 0, 0
    for number in tl.range(0, source.n_chunks):
        begin = tl.where(its_chunk == number, stop, begin)
        stop += tl.load(source.counts + number)
        end = tl.where(its_chunk == number, stop, end)
    begin, end = tl.where(ours, begin, stop), tl.where(ours, end, stop)
    while tl.max(end - begin) > 0:
        size = tl.maximum((end - begin + FAN - 1) // FAN, 1)
        last = begin[:, None] + (tl.arange(0, FAN)[None, :] + 1) * size[:, None] - 1  # of each part
        inside = last < end[:, None]
        word = tl.load(source.words + last, mask=inside, other=0) & PLACE
        begin += size * tl.sum((inside & (word < place)).to(tl.int32), axis=1)
        end = tl.minimum(end, begin + size - 1)
    return begin


@triton.jit(do_not_specialize=["n_blocks", "n_slots", "n_words", "share"])
def prepare_kernel(
    source, cut, codes, draft, orders, body, n_blocks, n_slots, n_words, share,
    hybrid: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Program: one tensor, `width` blocks, and `share` of the n_words words that are to be zeros."""
    program = tl.program_id(0)
    for start in tl.range(program * share, tl.minimum((program + 1) * share, n_words), CLEARED):
        at = start + tl.arange(0, CLEARED)
        tl.store(body + at, at * 0, mask=at < n_words)
    if program < n_slots:
        if hybrid:
            tl.store(orders + program, 0)
            tl.store(draft.classes + program, 0)
            tl.store(draft.extras + program, 0)
        else:
            choose_order(codes, orders, draft, program)
    block = program * width + tl.arange(0, width)
    if program * width <= n_blocks:
        tl.store(draft.starts + block, find_starts(source, cut, block, n_blocks), mask=block <= n_blocks)


@triton.jit
def place_of(word, at, source, its_chunk, single: tl.constexpr):
    """Of words at `at`, from the beginning of its_chunk on."""
    place = word & PLACE
    if not single:
        stop = 0
        for number in tl.range(0, source.n_chunks):
            stop += tl.load(source.counts + number)
            place += tl.where((at >= stop) & (number >= its_chunk), source.chunk, 0)
    return place


@triton.jit
def read_row(source, row, first, stop, last_word, begin, single: tl.constexpr):
    """The words of ROW elements from each of `row` on, and their gaps, of a block that has the words first .. stop - 1.

    Behind the last word it comes again and again, with gaps of -1: (gap >> k) + 1 bits in unary are none.
    """
    its_chunk = 0 if single else (begin // source.chunk).to(tl.int32)
    origin = (begin - its_chunk * source.chunk).to(tl.int32)
    here, words, gaps = source.words + row, (), ()
    before = tl.load(here - 1, mask=(row > first) & (row < stop), other=last_word)
    before = place_of(before, tl.minimum(row, stop) - 1, source, its_chunk, single)
    before = tl.where(row > first, before, origin - 1)
    for j in tl.static_range(ROW):
        word = tl.load(here + j, mask=row < stop - j, other=last_word)
        place = place_of(word, tl.minimum(row + j, stop - 1), source, its_chunk, single)
        words, gaps, before = words + (word,), gaps + (place - before - 1,), place  # noqa: RUF005 Triton has no star
    return words, gaps


@triton.jit
def lookup(table, word):
    """What a table has for the d of a word, and more above."""
    return table >> ((word >> 26) & 28)


@triton.jit
def put(target, position, value, have):
    """Ors a field of up to 32 bits into words that are zero there."""
    shift, value = (position & 31).to(tl.uint32), value.to(tl.uint32)
    word, rest = target + (position >> 5), (value >> 1) >> (31 - shift)
    tl.atomic_or(word, (value << shift).to(tl.int32, bitcast=True), mask=have, sem="relaxed")
    tl.atomic_or(word + 1, rest.to(tl.int32, bitcast=True), mask=have & (rest != 0), sem="relaxed")


@triton.jit(do_not_specialize=["n_blocks", "n_groups"])
def survey_kernel(source, cut, draft, body, n_blocks, n_groups, hybrid: tl.constexpr, single: tl.constexpr):
    """Programs at work side by side add to different sums, since atomics on one word wait for each other: with the
    blocks in order an H200 took 84 us for 65,536 of them, without the sums 59."""
    program = tl.program_id(0)
    group = program % n_groups
    block = (group << draft.group_bits) + program // n_groups
    if block < n_blocks:
        first, stop = tl.load(draft.starts + block), tl.load(draft.starts + block + 1)
        count, size = stop - first, 0
        if count > 0:
            begin, k = tl.load(cut.begin + block), low_bits(tl.load(cut.length + block), count)
            table = tl.load(draft.extras + tl.load(cut.tensor + block))
            last_word = tl.load(source.words + stop - 1)
            unary, extra, n_seen = tl.zeros((WARP,), tl.int32), tl.zeros((WARP,), tl.int32), 0
            for start in tl.range(first, stop, WARP * ROW):
                row = start + tl.arange(0, WARP) * ROW
                words, gaps = read_row(source, row, first, stop, last_word, begin, single)
                for j in tl.static_range(ROW):
                    unary += (gaps[j] >> k) + 1
                    extra += (lookup(table, words[j]) >> 2) & 3
                n_seen += WARP * ROW
            unary_bits = tl.sum(unary)
            extra_bits = tl.sum(extra) - (n_seen - count) * ((lookup(table, last_word) >> 2) & 3)
            bits = tl.load(cut.count_bits + block) + count * (k + (1 if hybrid else 3)) + unary_bits + extra_bits
            size, entry = (bits + 31) >> 5, tl.load(cut.entry + block)
            put(body + (entry >> 5), (entry & 31).to(tl.int32), size, count > 0)
            tl.store(draft.unary_bits + block, unary_bits)
            tl.store(draft.low_bits + block, k)
            tl.atomic_add(draft.sums + group, size, sem="relaxed")
        tl.store(draft.sizes + block, size)


@triton.jit
def sum_of(numbers, begin, end):
    """numbers[begin] + .. + numbers[end - 1]."""
    total = tl.zeros((SUMMED,), tl.int32)
    for start in tl.range(begin, end, SUMMED):
        at = start + tl.arange(0, SUMMED)
        total += tl.load(numbers + at, mask=at < end, other=0)
    return tl.sum(total)


@triton.jit
def put_low(payload, position, gaps, half: tl.constexpr, k, n_left):
    """The low bits of HALF gaps of each lane, of which n_left are the block's."""
    mask = (1 << k) - 1
    if k <= 32 // HALF:
        field = n_left * 0
        for j in tl.static_range(HALF):
            field |= (gaps[half + j] & mask) << (j * k)
        field &= tl.where(n_left < HALF, (1 << (tl.maximum(n_left, 0) * k)) - 1, -1)
        put(payload, position, field, n_left > 0)
    else:
        for j in tl.static_range(HALF):
            put(payload, position + j * k, gaps[half + j] & mask, n_left > j)


@triton.jit
def put_unary(payload, position, gaps, half: tl.constexpr, k, n_left):
    """HALF gaps of each lane in unary; returns where they end. A shift beyond 0 .. 31 is of no lane that is put."""
    field, n_bits = n_left * 0, n_left * 0
    for j in tl.static_range(HALF):
        n_bits += (gaps[half + j] >> k) + 1
        field |= 1 << (n_bits - 1)
    if tl.max(n_bits) <= 32:
        put(payload, position, field, n_left > 0)
    else:
        one = position - 1
        for j in tl.static_range(HALF):
            one += (gaps[half + j] >> k) + 1
            put(payload, one, n_left * 0 + 1, n_left > j)
    return position + n_bits


@triton.jit
def join_codes(words, class_table, extra_table, n_left, last_extra, hybrid: tl.constexpr):
    """Of ROW words of each lane, of which n_left are the block's: the code fields, the extra bits and their number."""
    n_here, code_bits = tl.minimum(tl.maximum(n_left, 0), ROW), 1 if hybrid else 3
    code, extra, n_extra = n_left * 0, n_left * 0, n_left * 0
    for j in tl.static_range(ROW):
        sign = (words[j] >> 31) & 1
        code |= ((lookup(class_table, words[j]) & 6) | sign) << (code_bits * j)
        if not hybrid:
            entry = lookup(extra_table, words[j])
            extra |= (entry & 3) << n_extra
            n_extra += (entry >> 2) & 3
    n_extra -= (ROW - n_here) * last_extra
    return code & ((1 << (n_here * code_bits)) - 1), extra & ((1 << n_extra) - 1), n_extra


@triton.jit(do_not_specialize=["n_directory"])
def write_kernel(source, cut, draft, body, n_directory, hybrid: tl.constexpr, single: tl.constexpr):
    block = tl.program_id(0)
    first, stop = tl.load(draft.starts + block), tl.load(draft.starts + block + 1)
    count = stop - first
    if count > 0:
        begin, tensor, k = tl.load(cut.begin + block), tl.load(cut.tensor + block), tl.load(draft.low_bits + block)
        class_table, extra_table = tl.load(draft.classes + tensor), tl.load(draft.extras + tensor)
        last_word = tl.load(source.words + stop - 1)
        last_extra = (lookup(extra_table, last_word) >> 2) & 3
        group = block >> draft.group_bits
        size_before = sum_of(draft.sums, 0, group) + sum_of(draft.sizes, group << draft.group_bits, block)
        payload, low = body + n_directory + size_before, tl.load(cut.count_bits + block)
        code_bits: tl.constexpr = 1 if hybrid else 3
        code_plane = low + count * k
        unary = code_plane + count * code_bits
        extra_plane = unary + tl.load(draft.unary_bits + block)
        tl.atomic_or(payload, count - 1, sem="relaxed")
        for start in tl.range(first, stop, WARP * ROW):
            row = start + tl.arange(0, WARP) * ROW
            words, gaps = read_row(source, row, first, stop, last_word, begin, single)
            ordinal, n_left, n_unary = row - first, stop - row, row * 0
            for j in tl.static_range(ROW):
                n_unary += (gaps[j] >> k) + 1
            position = unary + tl.cumsum(n_unary) - n_unary
            unary += tl.sum(n_unary)
            for half in tl.static_range(0, ROW, HALF):
                put_low(payload, low + (ordinal + half) * k, gaps, half, k, n_left - half)
                position = put_unary(payload, position, gaps, half, k, n_left - half)
            code, extra, n_extra = join_codes(words, class_table, extra_table, n_left, last_extra, hybrid)
            put(payload, code_plane + ordinal * code_bits, code, n_left > 0)
            if not hybrid:
                put(payload, extra_plane + tl.cumsum(n_extra) - n_extra, extra, n_left > 0)
                extra_plane += tl.sum(n_extra)


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """As `reference.pack`; the words are those of `encode`, and are not checked."""
    device, count, n_slots = words.device, blocks.count, len(blocks.layout)
    group_bits = (count.bit_length() + 1) // 2  # as many groups of blocks as blocks in a group
    n_groups = -(-count >> group_bits)
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    zeros, (orders, classes, extras) = empty(blocks.words + n_groups), empty(3, n_slots)
    body, sums = zeros[: blocks.words], zeros[blocks.words :]
    starts, sizes, unary_bits, low_bits = empty(4, count + 1)
    draft = Draft(starts, sizes, unary_bits, low_bits, sums, group_bits, classes, extras)
    source, cut = WordSource(words, counts, len(counts), chunk), cut_of(blocks, device)
    n_programs = max(n_slots, count // FOUND + 1)
    share = -(-len(zeros) // n_programs)
    prepare_kernel[(n_programs,)](
        source, cut, codes.contiguous(), draft, orders, zeros, count, n_slots, len(zeros), share,
        hybrid=blocks.hybrid, width=FOUND, num_warps=1,
    )  # fmt: skip
    if count:
        inputs = (source, cut, draft, body)
        kind = {"hybrid": blocks.hybrid, "single": len(counts) == 1, "num_warps": 1}
        survey_kernel[(n_groups << group_bits,)](*inputs, count, n_groups, **kind)
        write_kernel[(count,)](*inputs, blocks.directory_words, **kind)
    return orders, body

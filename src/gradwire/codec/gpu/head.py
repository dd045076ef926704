"""The head of a message for CUDA: one Triton kernel writes it, one looks at all of them. In torch it is 30 launches.

And the checksum: sum_i mix(x_i + i KEY) of every message. Nothing here waits for the device.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.codec import header

FIXED = tl.constexpr(header.FIXED)  # words before the counts
KEY, MULTIPLIER = tl.constexpr(header.KEY), tl.constexpr(header.MULTIPLIER)
OWN = tl.constexpr(header.CHECKSUM.start // 2)  # the pair of words that the checksum is in
SUMMED, ROUNDS = 1024, 2  # pairs of words at a time, and how often
LOOKED_AT = 256  # words at a time


@triton.jit
def mixed(x):
    x = (x ^ (x >> 32)) * MULTIPLIER
    x = (x ^ (x >> 32)) * MULTIPLIER
    return x ^ (x >> 32)


@triton.jit
def pairs(words):
    """Words two by two, as 64 bits: the first is the low half."""
    low, high = tl.split(tl.reshape(words.to(tl.uint32, bitcast=True), (words.shape[0] // 2, 2)))
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit(do_not_specialize=["n_words"])
def checksum_kernel(messages, stride: tl.int64, n_words, total, width: tl.constexpr, rounds: tl.constexpr):
    """Program (part of a message, rank). Integers modulo 2^64: the order in which they are added is of no account.

    Without a mask but for the last part: with one, loads are a word each, and took 1.4 times as long.
    """
    rank, begin, added = tl.program_id(1), tl.program_id(0) * (width * rounds), tl.zeros((width,), tl.uint64)
    message, left = messages + rank * stride + 2 * begin, n_words - 2 * begin
    key, step = (begin + tl.arange(0, width)).to(tl.uint64) * KEY, tl.full((), width, tl.uint64) * KEY
    if left >= 2 * width * rounds:
        for number in tl.static_range(rounds):
            added += mixed(pairs(tl.load(message + number * 2 * width + tl.arange(0, 2 * width))) + key)
            key += step
    else:
        for number in tl.static_range(rounds):
            at = number * 2 * width + tl.arange(0, 2 * width)
            found = mixed(pairs(tl.load(message + at, mask=at < left, other=0)) + key)
            added += tl.where(number * 2 * width + 2 * tl.arange(0, width) < left, found, 0)
            key += step
    all_of_them = tl.sum(added)
    if (begin == 0) & (n_words > 2 * OWN):  # without its own place
        at = 2 * OWN + tl.arange(0, 2)
        own = pairs(tl.load(message + at, mask=at < n_words, other=0))
        all_of_them -= tl.sum(mixed(own + tl.full((), OWN, tl.uint64) * KEY))
    tl.atomic_add(total + rank, all_of_them.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def copy_words(source, target, n_words, width: tl.constexpr):
    for start in tl.range(0, n_words, width):
        at = start + tl.arange(0, width)
        tl.store(target + at, tl.load(source + at, mask=at < n_words, other=0), mask=at < n_words)


@triton.jit
def fixed_word(at, magic, kind, digest_low, digest_high, step, flags, n_slots, n_chunks):
    """What word `at` of the first eight is; 0 from word 8 on."""
    word = tl.where(at == 0, magic, 0)
    word = tl.where(at == 1, kind, word)
    word = tl.where(at == 2, digest_low, word)
    word = tl.where(at == 3, digest_high, word)
    word = tl.where(at == 4, step, word)
    word = tl.where(at == 5, flags, word)
    word = tl.where(at == 6, n_slots, word)
    return tl.where(at == 7, n_chunks, word)


@triton.jit(do_not_specialize=["magic", "kind", "digest_low", "digest_high", "step", "flags", "n_slots", "n_chunks"])
def head_kernel(
    message, finite, counts, passed, exponents, orders,
    magic, kind, digest_low, digest_high, step, flags, n_slots, n_chunks, compact: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program: everything before the body; the checksum's own words are still zeros."""
    at = tl.arange(0, 16)
    flags += tl.load(finite).to(tl.int32)
    word = fixed_word(at, magic, kind, digest_low, digest_high, step, flags, n_slots, n_chunks)
    tl.store(message + at, word, mask=at < FIXED)
    copy_words(counts, message + FIXED, n_chunks, width)
    its_passed = message + FIXED + n_chunks
    copy_words(passed, its_passed, n_slots, width)
    small, n_small = its_passed + n_slots, (n_slots + 3) // 4
    for start in tl.range(0, n_small, width):
        place = start + tl.arange(0, width)
        four = place * 0
        for byte in tl.static_range(4):
            slot = 4 * place + byte
            four |= (tl.load(exponents + slot, mask=slot < n_slots, other=0) & 0xFF) << (8 * byte)
        tl.store(small + place, four, mask=place < n_small)
    if compact:
        copy_words(orders, small + n_small, n_slots, width)


@triton.jit(
    do_not_specialize=["magic", "kind", "digest_low", "digest_high", "step", "flags", "n_slots", "n_chunks", "most"]
)
def inspect_kernel(
    messages, stride: tl.int64, total, problems, magic, kind, digest_low, digest_high, step, flags, n_slots, n_chunks,
    most: tl.int64, width: tl.constexpr,
):  # fmt: skip
    """Program: a rank. problems uint8 [W, 7], in the order of header.PROBLEMS; total: their checksums."""
    rank = tl.program_id(0)
    message, out = messages + rank * stride, problems + rank * 7
    at = tl.arange(0, 8)
    word = tl.load(message + at)
    other = (word != fixed_word(at, magic, kind, digest_low, digest_high, step, flags, n_slots, n_chunks)).to(tl.int32)
    tl.store(out, tl.max(tl.where(at == 0, other, 0)).to(tl.uint8))
    tl.store(out + 1, tl.max(tl.where(at == 1, other, 0)).to(tl.uint8))
    of_layout = (at == 2) | (at == 3) | (at == 6) | (at == 7)
    tl.store(out + 2, tl.max(tl.where(of_layout, other, 0)).to(tl.uint8))
    tl.store(out + 3, tl.max(tl.where(at == 4, other, 0)).to(tl.uint8))
    low, high = tl.load(message + 8).to(tl.int64), tl.load(message + 9).to(tl.int64)
    told = (low & 0xFFFFFFFF) | (high << 32)
    tl.store(out + 4, (tl.load(total + rank) != told).to(tl.uint8))
    negative, sent = 0, tl.full((), 0, tl.int64)
    for start in tl.range(0, n_chunks, width):
        chunk = start + tl.arange(0, width)
        count = tl.load(message + FIXED + chunk, mask=chunk < n_chunks, other=0)
        negative = tl.maximum(negative, tl.max((count < 0).to(tl.int32)))
        sent += tl.sum(count.to(tl.int64))
    tl.store(out + 5, ((negative > 0) | (sent > most)).to(tl.uint8))
    below = 0
    for start in tl.range(0, n_slots, width):
        slot = start + tl.arange(0, width)
        passed = tl.load(message + FIXED + n_chunks + slot, mask=slot < n_slots, other=0)
        below = tl.maximum(below, tl.max((passed < -1).to(tl.int32)))
    tl.store(out + 6, below.to(tl.uint8))


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    rows = messages.reshape(-1, messages.shape[-1])
    total = torch.zeros(len(rows), dtype=torch.int64, device=messages.device)
    if rows.numel():
        n_words = rows.shape[1]
        grid = (-(-n_words // (2 * SUMMED * ROUNDS)), len(rows))
        checksum_kernel[grid](rows, rows.stride(0), n_words, total, width=SUMMED, rounds=ROUNDS)
    return total.view(*messages.shape[:-1], 1).view(torch.int32)


def seal(shape: header.Shape, step: int, parts: header.Parts) -> Tensor:
    """As `header.write`."""
    if shape.format == header.BARE:
        return header.write(shape, step, parts, checksum)
    finite, counts, passed, exponents, orders, body = parts
    message = torch.empty(shape.words, dtype=torch.int32, device=body.device)
    message[shape.body] = body
    given = (finite, counts, passed, exponents, passed if orders is None else orders)
    head_kernel[(1,)](
        message,
        *(part.contiguous() for part in given),
        *shape.fixed(step),
        compact=orders is not None,
        width=LOOKED_AT,
    )
    message[header.CHECKSUM] = checksum(message)
    return message


def inspect(messages: Tensor, shape: header.Shape, step: int) -> Tensor:
    """As `header.check`."""
    if shape.format == header.BARE:
        return header.check(messages, shape, step, checksum)
    header.refuse_length(messages, shape)
    problems = torch.empty(len(messages), len(header.PROBLEMS), dtype=torch.uint8, device=messages.device)
    total = checksum(messages).view(torch.int64)
    inspect_kernel[(len(messages),)](
        messages, messages.stride(0), total, problems, *shape.fixed(step), shape.most, width=LOOKED_AT
    )
    return problems.view(torch.bool)

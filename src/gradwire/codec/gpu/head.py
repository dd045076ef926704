"""The head of a message for CUDA: one Triton kernel writes it, one looks at all of them. In torch it is 30 launches."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

FIXED = tl.constexpr(10)  # words before the counts


@triton.jit
def copy_words(source, target, n_words, width: tl.constexpr):
    for start in tl.range(0, n_words, width):
        at = start + tl.arange(0, width)
        tl.store(target + at, tl.load(source + at, mask=at < n_words, other=0), mask=at < n_words)


@triton.jit
def fixed_word(at, magic, kind, digest_low, digest_high, step, n_slots, n_chunks):
    """What word `at` of the first eight is on every rank; 0 for the flags and from word 8 on."""
    word = tl.where(at == 0, magic, 0)
    word = tl.where(at == 1, kind, word)
    word = tl.where(at == 2, digest_low, word)
    word = tl.where(at == 3, digest_high, word)
    word = tl.where(at == 4, step, word)
    word = tl.where(at == 6, n_slots, word)
    return tl.where(at == 7, n_chunks, word)


@triton.jit(do_not_specialize=["magic", "kind", "digest_low", "digest_high", "step", "n_slots", "n_chunks"])
def head_kernel(
    message, finite, counts, passed, exponents, orders, magic, kind, digest_low, digest_high, step, n_slots, n_chunks,
    compact: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program: everything before the body; the checksum's own words are still zeros."""
    at = tl.arange(0, 16)
    word = fixed_word(at, magic, kind, digest_low, digest_high, step, n_slots, n_chunks)
    flags = tl.load(finite).to(tl.int32)
    tl.store(message + at, tl.where(at == 5, flags, word), mask=at < FIXED)
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


@triton.jit(do_not_specialize=["magic", "kind", "digest_low", "digest_high", "step", "n_slots", "n_chunks", "most"])
def inspect_kernel(
    messages, stride: tl.int64, total, problems, magic, kind, digest_low, digest_high, step, n_slots, n_chunks,
    most: tl.int64, width: tl.constexpr,
):  # fmt: skip
    """Program: a rank. problems uint8 [W, 7], in the order of header.PROBLEMS; total: their checksums."""
    rank = tl.program_id(0)
    message, out = messages + rank * stride, problems + rank * 7
    at = tl.arange(0, 8)
    word = tl.load(message + at)
    other = (word != fixed_word(at, magic, kind, digest_low, digest_high, step, n_slots, n_chunks)).to(tl.int32)
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

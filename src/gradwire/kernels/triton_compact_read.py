"""The compact format of step 6 for CUDA, second half: the payloads back to words. See triton_compact.py."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.triton_compact import SKEWED, count_bits, fetch, first_and_width, low_bits

MOST_WORDS = tl.constexpr((1 << 26) - 1)  # of a payload: 2^24 elements need far less, and its bits fit an int32


@triton.jit
def read_places(
    payload, n_bits, low, k, unary, count, length, words, rank_counts, begin, n_chunks, chunk, lanes: tl.constexpr
):
    """Lanes are bits of the unary plane: writes the count places, each within its chunk, and counts them by chunk.

    Returns (the bit after the last one, elements found, whether all places are inside the block).
    """
    done, total, end, good = 0, -1, unary, True
    origin = begin - begin // chunk * chunk
    bit = unary
    while (bit < n_bits) & (done < count):
        position = bit + tl.arange(0, lanes)
        word = tl.load(payload + (position >> 5), mask=position < n_bits, other=0)
        one = (word >> (position & 31)) & 1
        ordinal = done + tl.cumsum(one) - 1
        ours = (one == 1) & (ordinal < count)
        gap = tl.where(ours, fetch(payload, low + ordinal * k, ordinal * 0 + k, n_bits, ours) + 1, 0)
        zeros = position - unary - ordinal
        place = (tl.minimum(zeros, length) << tl.minimum(k, 6)).to(tl.int64) << (k - tl.minimum(k, 6))
        place += total + tl.cumsum(gap)
        inside = ours & (place < length)
        good &= tl.max((ours & (place >= length)).to(tl.int32)) == 0
        far = origin + place
        its_chunk = far // chunk
        tl.store(words + ordinal, (far - its_chunk * chunk).to(tl.int32), mask=inside)
        for number in tl.range(0, n_chunks):
            n_here = tl.sum((inside & (its_chunk + begin // chunk == number)).to(tl.int32))
            if n_here != 0:
                tl.atomic_add(rank_counts + number, n_here, sem="relaxed")
        end = tl.maximum(end, tl.max(tl.where(ours, position + 1, 0)))
        done += tl.sum(ours.to(tl.int32))
        total += tl.sum(gap)
        bit += lanes
    return end, done, good


@triton.jit
def read_codes(payload, n_bits, plane, extra, count, order, words, hybrid: tl.constexpr, lanes: tl.constexpr):
    """Adds the codes to the places; returns the bit after the extra plane."""
    skewed = (order & SKEWED) != 0
    for start in tl.range(0, count, lanes):
        ordinal = start + tl.arange(0, lanes)
        have = ordinal < count
        place = tl.load(words + ordinal, mask=have, other=0)
        if hybrid:
            code = fetch(payload, plane + ordinal, ordinal * 0 + 1, n_bits, have) << 3
        else:
            sign_class = fetch(payload, plane + ordinal * 3, ordinal * 0 + 3, n_bits, have)
            first, width = first_and_width(sign_class >> 1, skewed)
            width = tl.where(have, width, 0)
            symbol = first + fetch(payload, extra + tl.cumsum(width) - width, width, n_bits, have)
            extra += tl.sum(width)
            code = ((sign_class & 1) << 3) | ((order >> (3 * symbol)) & 7)
        tl.store(words + ordinal, place | (code << 28), mask=have)
    return extra


@triton.jit(do_not_specialize=["n_blocks", "n_chunks", "chunk", "room"])
def read_kernel(
    bodies, stride: tl.int64, orders, orders_stride: tl.int64, cut, found, starts, words, counts, refused, broken,
    n_blocks, n_chunks, chunk, room, hybrid: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Program (block, rank). refused: ranks of which nothing is to be read. starts: elements up to each block's end."""
    block, rank = tl.program_id(0), tl.program_id(1)
    count = tl.load(found + rank * n_blocks + block)
    if (tl.load(refused + rank) == 0) & (count > 0):
        body = bodies + rank * stride
        length, begin = tl.load(cut.length + block), tl.load(cut.begin + block)
        order = tl.load(orders + rank * orders_stride + tl.load(cut.tensor + block))
        payload_at = tl.load(body + block - 1, mask=block > 0, other=0)
        payload = body + n_blocks + payload_at
        n_words = tl.load(body + block) - payload_at
        n_bits = tl.minimum(n_words, MOST_WORDS) * 32
        out = words + rank.to(tl.int64) * room + tl.load(starts + rank * n_blocks + block) - count
        k, low = low_bits(length, count), count_bits(length)
        plane = low + count * k
        unary = plane + count * (1 if hybrid else 3)
        good = (unary + count <= n_bits) & (n_words <= MOST_WORDS)
        if good:
            end, done, inside = read_places(
                payload, n_bits, low, k, unary, count, length, out, counts + rank * n_chunks, begin, n_chunks, chunk,
                lanes,
            )  # fmt: skip
            good = inside & (done == count)
            if good:
                tl.debug_barrier()
                end = read_codes(payload, n_bits, plane, end, count, order, out, hybrid, lanes)
                last = tl.load(payload + (n_bits >> 5) - 1)
                used = end - (n_bits - 32)  # 1 .. 32 bits of the last word
                good = (used >= 1) & (used <= 32)
                left = (last.to(tl.int64) & 0xFFFFFFFF) >> tl.minimum(tl.maximum(used, 0), 32).to(tl.int64)
                good &= left == 0
        if not good:
            tl.store(broken + rank, 1)

"""Steps 2 and 3 as machine code for the CPU: the one pass over a bucket, loops that Numba compiles.

A bucket is cut into segments, runs of elements of one tensor. Every function takes a range of segments, so that
threads share them; all of them release the GIL. No fast-math anywhere: every operation is rounded by itself.
"""

from __future__ import annotations

import numpy as np

from gradwire.codec.cpu.bit_masks import N_FLAGS, lowest_bits
from gradwire.compile.machine_code import Array, compiled, trailing_zeros

TILE = 1024  # elements that stay in the first cache between the loop that decides and the one that collects
PASSES, BAD = 1, 2  # flags
BADS = np.uint64(0x0202020202020202)  # of eight elements
MAGNITUDE = np.int32(0x7FFFFFFF)
LARGEST = np.float32(3.4028234663852886e38)
ZERO = np.float32(0)
ONE = np.uint64(1)


@compiled
def decide_tile(
    r: Array,
    v: Array,
    g: Array,
    m: Array,
    flags: Array,
    alpha: np.float32,
    zeta: np.float32,
    least: np.float32,
    floor_square: np.float32,
) -> None:
    """r += g, v += m, and v decays where the element does not pass; flags: PASSES, BAD, or 0.

    A bad value adds nothing. No sum, no maximum, no branch: so the loop is vectorized whole.
    """
    for i in range(r.size):
        a, b = r[i] + g[i], v[i] + m[i]
        good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
        a = a if good else r[i]
        b = b if good else v[i]
        passes = (a * a > b * alpha + floor_square) & (abs(a) >= least)
        r[i] = a
        v[i] = b if passes else b * zeta
        flags[i] = np.uint8(passes) | np.uint8(not good) << np.uint8(1)


@compiled
def decide_tile_by_score(
    r: Array,
    v: Array,
    g: Array,
    m: Array,
    flags: Array,
    alpha: np.float32,
    zeta: np.float32,
    least: np.float32,
    limit: np.float32,
) -> None:
    """As `decide_tile`, where the score decides; its limit as a float32 (limits.py)."""
    for i in range(r.size):
        a, b = r[i] + g[i], v[i] + m[i]
        good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
        a = a if good else r[i]
        b = b if good else v[i]
        passes = (a * a - b * alpha >= limit) & (abs(a) >= least)
        r[i] = a
        v[i] = b if passes else b * zeta
        flags[i] = np.uint8(passes) | np.uint8(not good) << np.uint8(1)


@compiled
def collect_tile(
    r: Array,
    v: Array,
    flags: Array,
    offset: np.uint64,
    places: Array,
    old_residual: Array,
    old_variance: Array,
    n_found: np.uint64,
) -> np.uint64:
    """Writes down who passes, and r = v = 0 there; how many there are now.

    Indices are unsigned, because Numba tests signed ones for their sign.
    """
    for start in range(0, r.size, N_FLAGS):
        mask: int = lowest_bits(flags, np.uint64(start))  # type: ignore[call-arg]
        while mask != 0:
            pick = np.uint64(start) + np.uint64(trailing_zeros(mask))
            mask &= mask - 1
            places[n_found] = np.int32(offset + pick)
            old_residual[n_found], old_variance[n_found] = r[pick], v[pick]
            r[pick], v[pick] = ZERO, ZERO
            n_found += ONE
    return n_found


@compiled
def largest(residual: Array, top: np.int32) -> np.int32:
    """The bits of the largest |r|, or `top`: integers, so that the loop is vectorized."""
    bits = residual.view(np.int32)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top


@compiled
def least_sent(top: np.int32, half: np.int32, top_half: np.int32, least: np.float32) -> np.float32:
    """The smallest |r| that can be sent if the tensor's largest one has at least the bits `top`."""
    if half < 0:
        return least
    bound = np.zeros(1, np.int32)
    exponent = min((top + top_half) >> np.int32(23), np.int32(254))
    bound[0] = max(((exponent - np.int32(7)) << np.int32(23)) - half, np.int32(0))
    return max(bound.view(np.float32)[0], least)


@compiled
def stream(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    inputs: tuple[Array, Array, Array, Array],
    test: tuple[np.float32, np.float32, np.float32, np.float32],
    limits: Array,
    window: tuple[np.int32, np.int32],
    lists: tuple[Array, Array, Array],
    counts: Array,
    tops: Array,
    bad: Array,
) -> None:
    """Accumulate and decide for the segments first..last; who passes is written down, the others are finished.

    A passing element gets r = v = 0 at once, because nearly all of them are sent; `emit` puts the others back. What is
    below the window of the largest |r| found so far is certainly not sent, so it does not pass: to put one back costs
    two cache misses. inputs: r, v, g, m. test: alpha, zeta, the least |r|, floor^2. limits: of the scores, where these
    decide, or empty. window: what rounds a size, -1 where there is no window, and what rounds the largest. lists:
    place, r, v. tops: bits of the largest |r|.
    """
    flags = np.zeros(TILE, np.uint8)
    eights = flags.view(np.uint64)
    (residual, variance, grad, moment), (alpha, zeta, least, floor_square), (half, top_half) = inputs, test, window
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        found = lists[0][begin:end], lists[1][begin:end], lists[2][begin:end]
        n_found, wrong, top, bound = np.uint64(0), np.uint64(0), np.int32(0), least
        for tile in range(begin, end, TILE):
            here = slice(tile, min(tile + TILE, end))
            r, v = residual[here], variance[here]
            if limits.size > 0:
                decide_tile_by_score(r, v, grad[here], moment[here], flags, alpha, zeta, bound, limits[segment])
            else:
                decide_tile(r, v, grad[here], moment[here], flags, alpha, zeta, bound, floor_square)
            flags[r.size :] = 0
            for i in range(eights.size):
                wrong |= eights[i]
            before = np.int64(n_found)
            n_found = collect_tile(r, v, flags, np.uint64(tile - begin), *found, n_found)
            if np.int64(n_found) != before:
                top = largest(found[1][before : np.int64(n_found)], top)
                bound = least_sent(top, half, top_half, least)
        counts[segment], bad[segment], tops[segment] = n_found, wrong & BADS != 0, top

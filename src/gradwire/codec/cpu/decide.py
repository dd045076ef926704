"""Steps 2 and 3 as machine code for the CPU: accumulate and decide, the one pass over a bucket (with a density, two).

A bucket is cut into segments, runs of elements of one tensor. Every function takes a range of segments, so that
threads share them; all of them release the GIL. No fast-math anywhere: every operation is rounded by itself.
Where v counts for nothing, None stands for v and m, and for the limits where there is no density: Numba compiles such a
call by itself, without what is said of them.
"""
# mypy: disable-error-code="index"
# An array that is None is not looked into, which Numba sees and mypy does not.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import limits as score_limits
from gradwire.codec.cpu.bit_masks import N_FLAGS, lowest_bits
from gradwire.codec.interface import NOTHING, ROUNDING, SMALLEST, Rule
from gradwire.compile.machine_code import Array, machine_code, trailing_zeros
from gradwire.compile.segments import Segments
from gradwire.compile.threads import shared
from gradwire.layout import Layout

TILE = 1024  # elements that stay in the first cache between the loop that decides and the one that collects
PASSES, BAD = 1, 2  # flags
BADS = np.uint64(0x0202020202020202)  # of eight elements
MAGNITUDE = np.int32(0x7FFFFFFF)
LARGEST = np.float32(3.4028234663852886e38)
ZERO = np.float32(0)
ONE = np.uint64(1)
BINS, SHIFT = np.int32(score_limits.BINS), np.int32(score_limits.SHIFT)
ASIDE = 8  # bins of what does not count: several, because an addition waits for the one before it to the same


@machine_code
def decide_tile(
    r: Array,
    v: Array | None,
    g: Array,
    m: Array | None,
    flags: Array,
    test: tuple[np.float32, np.float32, np.float32, np.float32],
    least: np.float32,
    limit: np.float32 | None,
) -> None:
    """r += g, v += m, and v decays where the element does not pass; flags: PASSES, BAD, or 0. limit: of the score.

    A bad value adds nothing. No sum, no maximum, no branch: so the loop is vectorized whole. What it has in common with
    `score_tile` stands in both: in a function of its own it made `stream` 10 to 20 % slower.
    """
    alpha, zeta, _, floor_square = test
    for i in range(r.size):
        a, b = r[i] + g[i], ZERO
        if v is None:
            good = abs(a) <= LARGEST
            a = a if good else r[i]
        else:
            b = v[i] + m[i]
            good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
            a = a if good else r[i]
            b = b if good else v[i]
        if limit is None:
            passes = (a * a > b * alpha + floor_square) & (abs(a) >= least)
        else:
            passes = (a * a - b * alpha >= limit) & (abs(a) >= least)
        r[i] = a
        if v is not None:
            v[i] = b if passes else b * zeta
        flags[i] = np.uint8(passes) | np.uint8(not good) << np.uint8(1)


@machine_code
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

    Where there is no v, it is given r twice, and does twice the same: with a None that it asks for, one core of an AMD
    EPYC took 15 % longer over the whole pass where 1 in 10 passes. Both are loaded before anything is stored: each
    could be what the other overwrites. Indices are unsigned, because Numba tests signed ones for their sign.
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


@machine_code
def largest(residual: Array, top: np.int32) -> np.int32:
    """The bits of the largest |r|, or `top`: integers, so that the loop is vectorized."""
    bits = residual.view(np.int32)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top


@machine_code
def least_sent(top: np.int32, half: np.int32, top_half: np.int32, least: np.float32) -> np.float32:
    """The smallest |r| that can be sent if the tensor's largest one has at least the bits `top`."""
    if half < 0:
        return least
    bound = np.zeros(1, np.int32)
    exponent = min((top + top_half) >> np.int32(23), np.int32(254))
    bound[0] = max(((exponent - np.int32(7)) << np.int32(23)) - half, np.int32(0))
    return max(bound.view(np.float32)[0], least)


@machine_code
def stream(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    residual: Array,
    variance: Array | None,
    grad: Array,
    moment: Array | None,
    test: tuple[np.float32, np.float32, np.float32, np.float32],
    limits: Array | None,
    window: tuple[np.int32, np.int32],
    places: Array,
    old_residual: Array,
    old_variance: Array,
    counts: Array,
    tops: Array,
    bad: Array,
) -> None:
    """Accumulate and decide for the segments first..last; who passes is written down, the others are finished.

    A passing element gets r = v = 0 at once, because nearly all of them are sent; `settle` puts the others back. What
    is below the window of the largest |r| found so far is certainly not sent, so it does not pass: to put one back
    costs two cache misses. test: alpha, zeta, the least |r|, floor^2. limits: of the scores, where these decide.
    window: what rounds a size, -1 where there is no window, and what rounds the largest. tops: bits of the largest |r|.
    """
    flags = np.zeros(TILE, np.uint8)
    eights = flags.view(np.uint64)
    (_, _, least, _), (half, top_half) = test, window
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        whole = slice(begin, end)
        found = places[whole], old_residual[whole], old_variance[whole]
        n_found, wrong, top, bound = np.uint64(0), np.uint64(0), np.int32(0), least
        for tile in range(begin, end, TILE):
            here = slice(tile, min(tile + TILE, end))
            r, g = residual[here], grad[here]
            if variance is None:
                v, m, weighed = None, None, r
            else:
                v, m = variance[here], moment[here]
                weighed = v
            limit = None if limits is None else limits[segment]
            decide_tile(r, v, g, m, flags, test, bound, limit)
            flags[r.size :] = 0
            for i in range(eights.size):
                wrong |= eights[i]
            before = np.int64(n_found)
            n_found = collect_tile(r, weighed, flags, np.uint64(tile - begin), *found, n_found)
            if np.int64(n_found) != before:
                raised = largest(found[1][before : np.int64(n_found)], top)
                if raised != top:
                    top, bound = raised, least_sent(raised, half, top_half, least)
        counts[segment], bad[segment], tops[segment] = n_found, wrong & BADS != 0, top


@machine_code
def score_tile(
    r: Array,
    v: Array | None,
    g: Array,
    m: Array | None,
    scores: Array,
    bins: Array,
    alpha: np.float32,
    least: np.float32,
) -> None:
    """The bin of every element; r and v stay as they are. No branch, so both loops are vectorized whole."""
    bits = scores.view(np.int32)
    for i in range(r.size):
        a, b = r[i] + g[i], ZERO
        good = abs(a) <= LARGEST
        if v is not None:
            b = v[i] + m[i]
            good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
            b = b if good else v[i]
        a = a if good else r[i]
        score = a * a - b * alpha
        scores[i] = score if (score > ZERO) & (abs(a) >= least) else ZERO
    for i in range(r.size):
        bins[i] = bits[i] >> SHIFT if bits[i] > 0 else BINS + np.int32(i % ASIDE)


@machine_code
def histogram(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    residual: Array,
    variance: Array | None,
    grad: Array,
    moment: Array | None,
    alpha: np.float32,
    least: np.float32,
    counts: Array,
) -> None:
    """How many scores of the segments first..last are in which bin (limits.py), [segments, BINS]."""
    scores, bins, found = np.zeros(TILE, np.float32), np.zeros(TILE, np.int32), np.zeros(BINS + ASIDE, np.int32)
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        found[:] = 0
        for tile in range(begin, end, TILE):
            here = slice(tile, min(tile + TILE, end))
            r, g = residual[here], grad[here]
            if variance is None:
                v, m = None, None
            else:
                v, m = variance[here], moment[here]
            score_tile(r, v, g, m, scores, bins, alpha, least)
            for i in range(r.size):
                found[np.uint64(bins[i])] += np.int32(1)
        counts[segment] = found[:BINS]


@machine_code
def by_tensor(slots: Array, counts: Array, totals: Array) -> None:
    """Adds the histograms of all segments to those of their tensors, [K, ...]."""
    for segment in range(slots.size):
        row, total = counts[segment], totals[slots[segment]]
        for i in range(row.size):
            total[i] += row[i]


@machine_code
def exponents_of(tops: Array, slots: Array, top_half: np.int32, hybrid: bool, exponents: Array, biased: Array) -> None:
    """e_k or NOTHING, and biased, [K], from the bits of the largest |r| of every segment."""
    biased[:] = 0
    for segment in range(tops.size):
        biased[slots[segment]] = max(biased[slots[segment]], tops[segment])
    for slot in range(biased.size):
        said = biased[slot] > 0 and not hybrid
        biased[slot] = min((biased[slot] + top_half) >> np.int32(23), np.int32(254))
        exponents[slot] = biased[slot] - np.int32(127) if said else np.int32(NOTHING)


def accumulate_and_decide(
    segments: Segments,
    inputs: tuple[Array | None, ...],
    active: Tensor | None,
    layout: Layout,
    rule: Rule,
    lists: tuple[Array, Array, Array],
    counts: Array,
) -> tuple[Array, Array, bool]:
    """Steps 2 and 3 for a bucket. inputs: r, v, g, m; who passes goes into lists: place, r, v; how many into counts.

    Returns the exponents of the tensors, also biased (of the largest |r| that passes), and whether all was finite.
    """
    count, hybrid = segments.count, rule.tau is not None
    live = np.ones(count, np.uint8) if active is None else active.numpy().astype(np.uint8)[segments.slots]
    least = np.float32(SMALLEST)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(np.float32(rule.tau), np.float32(np.inf))
    floor, half = np.float32(rule.floor), ROUNDING[rule.rounding]
    test = (np.float32(rule.alpha), np.float32(rule.zeta), least, floor * floor)
    window = (np.int32(-1 if hybrid else half), np.int32(half if rule.rounding == "unbiased" else 0))
    tops, bad = np.empty(count, np.int32), np.empty(count, np.uint8)
    limits = None if rule.density is None else _limits(segments, inputs, live, layout, rule)
    args = (segments.begins, segments.ends, live, *inputs, test, limits, window, *lists, counts, tops, bad)
    _every(segments, stream, *args)
    exponents, biased = np.empty((2, segments.n_slots), np.int32)
    exponents_of(tops, segments.slots, window[1], hybrid, exponents, biased)
    return exponents, biased, not bad.any()


def _limits(segments: Segments, inputs: tuple[Array | None, ...], live: Array, layout: Layout, rule: Rule) -> Array:
    """From which score on an element passes, by segment."""
    parts, totals = np.empty((segments.count, BINS), np.int32), np.zeros((segments.n_slots, BINS), np.int32)
    numbers = (np.float32(rule.alpha), np.float32(SMALLEST))
    _every(segments, histogram, segments.begins, segments.ends, live, *inputs, *numbers, parts)
    by_tensor(segments.slots, parts, totals)
    return score_limits.limits(torch.from_numpy(totals), layout, rule).numpy().view(np.float32)[segments.slots]


def _every(segments: Segments, function: Callable[..., None], *args: Any) -> None:
    """function(first, last, ...) for the segments of every part."""
    if len(segments.parts) == 1:
        function(0, segments.count, *args)
    else:
        shared(segments.parts, function, *args)

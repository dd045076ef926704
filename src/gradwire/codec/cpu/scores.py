"""Step 3 as machine code for the CPU where a density is wanted: the histogram of the scores (limits.py).

As in compiled_stream.py, every function takes a range of segments, so that threads share them, and every operation is
rounded by itself.
"""

from __future__ import annotations

import numpy as np

from gradwire.codec import limits
from gradwire.codec.cpu.stream import LARGEST, TILE, ZERO
from gradwire.compile.machine_code import Array, compiled

BINS, SHIFT = np.int32(limits.BINS), np.int32(limits.SHIFT)
ASIDE = 8  # bins of what does not count: several, because an addition waits for the one before it to the same


@compiled
def score_tile(
    r: Array, v: Array, g: Array, m: Array, scores: Array, bins: Array, alpha: np.float32, least: np.float32
) -> None:
    """The bin of every element; r and v stay as they are. No branch, so both loops are vectorized whole.

    As in `decide_tile` a bad value adds nothing.
    """
    bits = scores.view(np.int32)
    for i in range(r.size):
        a, b = r[i] + g[i], v[i] + m[i]
        good = (abs(a) <= LARGEST) & (abs(b) <= LARGEST)
        a = a if good else r[i]
        b = b if good else v[i]
        score = a * a - b * alpha
        scores[i] = score if (score > ZERO) & (abs(a) >= least) else ZERO
    for i in range(r.size):
        bins[i] = bits[i] >> SHIFT if bits[i] > 0 else BINS + np.int32(i % ASIDE)


@compiled
def histogram(
    first: int,
    last: int,
    begins: Array,
    ends: Array,
    live: Array,
    inputs: tuple[Array, Array, Array, Array],
    alpha: np.float32,
    least: np.float32,
    counts: Array,
) -> None:
    """How many scores of the segments first..last are in which bin, [segments, BINS]; inputs: r, v, g, m."""
    scores, bins, found = np.zeros(TILE, np.float32), np.zeros(TILE, np.int32), np.zeros(BINS + ASIDE, np.int32)
    residual, variance, grad, moment = inputs
    for segment in range(first, last):
        begin, end = begins[segment], ends[segment] if live[segment] else begins[segment]
        found[:] = 0
        for tile in range(begin, end, TILE):
            here = slice(tile, min(tile + TILE, end))
            r = residual[here]
            score_tile(r, variance[here], grad[here], moment[here], scores, bins, alpha, least)
            for i in range(r.size):
                found[np.uint64(bins[i])] += np.int32(1)
        counts[segment] = found[:BINS]


@compiled
def by_tensor(slots: Array, counts: Array, totals: Array) -> None:
    """Adds the histograms of all segments to those of their tensors, [K, BINS]."""
    for segment in range(slots.size):
        row, total = counts[segment], totals[slots[segment]]
        for i in range(row.size):
            total[i] += row[i]

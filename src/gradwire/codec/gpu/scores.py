"""Step 3 for CUDA where a density is wanted: the histogram of the scores (limits.py), a Triton kernel.

histogram   reads every element once and writes nothing but counts: in shared memory, and from there, what is not zero,
            to those of the tensor. Integers: the order in which they are added is of no account.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.codec import limits
from gradwire.codec.gpu import records as kinds
from gradwire.codec.gpu import shared_memory as shared
from gradwire.codec.gpu.records import ALIGN, is_live, summed
from gradwire.codec.interface import Rule
from gradwire.compile.launching import UNFUSED
from gradwire.compile.tiles import Tiles, TileTable
from gradwire.layout import Layout

BINS, SHIFT = tl.constexpr(limits.BINS), tl.constexpr(limits.SHIFT)
ROWS, WARPS = 8, 8  # tiles of a program: its 4096 counters are cleared and added up once; not measured yet


@triton.jit
def count_tile(given, state, base, low, high, rule, memory, whole: tl.constexpr, size: tl.constexpr):
    """Adds the scores of one tile to the histogram in shared memory; those outside of it are 0, and do not count."""
    lane = tl.arange(0, size)
    a, b, _good = summed(given, state, lane, None if whole else (lane >= low) & (lane < high), base)
    score = a * a - b * rule.alpha
    shared.increment(memory, score.to(tl.int32, bitcast=True) >> SHIFT, (score > 0) & (tl.abs(a) >= rule.least))


@triton.jit
def histogram_kernel(given, state, cut, rule, histogram, size: tl.constexpr, group: tl.constexpr, rows: tl.constexpr):
    """One program for `rows` tiles of a group, which are of one tensor; the last ones may be empty."""
    first, memory = tl.program_id(0) * rows, shared.reserve(BINS)
    slot = tl.load(cut.slot + first // group)
    if is_live(cut, slot) & (tl.load(cut.high + first) > tl.load(cut.low + first)):
        shared.clear(memory, BINS)
        tl.debug_barrier()
        for tile in tl.range(first, first + rows):
            low, high = tl.load(cut.low + tile), tl.load(cut.high + tile)
            base = tl.multiple_of(tl.load(cut.base + tile), ALIGN)
            if high - low == size:
                count_tile(given, state, base, low, high, rule, memory, True, size)
            elif high > low:
                count_tile(given, state, base, low, high, rule, memory, False, size)
        tl.debug_barrier()
        counts = shared.get(memory, tl.arange(0, BINS))
        its_bins = histogram + slot.to(tl.int64) * BINS + tl.arange(0, BINS)
        tl.atomic_add(its_bins, counts, mask=counts != 0, sem="relaxed")


def limited(
    given: kinds.Held,
    state: kinds.Held,
    cut: TileTable,
    terms: kinds.RuleTerms,
    tiles: Tiles,
    layout: Layout,
    rule: Rule,
) -> kinds.RuleTerms:
    """The terms with the limits of this step's scores."""
    assert tiles.size >= 32 * WARPS, "an element that two threads hold would be counted twice"
    histogram = torch.zeros(tiles.n_slots, limits.BINS, dtype=torch.int32, device=state.residual.device)
    sizes = {"size": tiles.size, "group": tiles.group, "rows": ROWS, "num_warps": WARPS}
    histogram_kernel[(tiles.n_tiles // ROWS,)](given, state, cut, terms, histogram, **sizes, **UNFUSED)
    return terms._replace(limit=limits.limits(histogram, layout, rule).view(torch.float32))

"""Steps 2 to 4 for CUDA: what the kernels of one encode hand each other, and the arithmetic they share.

stream.py says what the kernels do. G groups of tiles, K tensors.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gradwire.compile.tiles import ALIGN as TILE_ALIGN

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
BAD = tl.constexpr(0x7FFFFFFF)  # the bits of no number
CLASSES = tl.constexpr(8)
DROPPED = tl.constexpr(8)
SPILLED = tl.constexpr(-1)
NOTHING = tl.constexpr(-128)
ALL, WINDOW, CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
APART = tl.constexpr(32)
CHUNKS = tl.constexpr(64)  # that the one program of `scan` looks at together
ALIGN = tl.constexpr(TILE_ALIGN)
SPAN = tl.constexpr(256)  # places of a spilled tile at a time: no more registers than the candidates take


class Visit(NamedTuple):
    """Tiles to be streamed: number, tensor, and where each begins, in units of ALIGN.

    By themselves, so that a program has its address after one read. H200, ratio 10,000: 1.500 ms to 1.494.
    """

    tile: Any
    slot: Any
    base: Any


class Held(NamedTuple):
    """r and v, or g and m. None in the place of v and m where v does not count: nobody keeps them."""

    residual: Any
    variance: Any


class RuleTerms(NamedTuple):
    """The rule as kernels compute with it: r^2 > alpha v + floor_square and |r| >= least.

    limit: with a density r^2 - alpha v >= limit instead, float32 [K] (limits.py); without one None.
    half, unbiased: the rounding. hybrid: tau is all that is sent; tau_binade: its biased exponent; tau_square: tau^2.
    """

    alpha: Any
    zeta: Any
    least: Any
    floor_square: Any
    limit: Any
    half: Any
    unbiased: Any
    hybrid: Any
    tau: Any
    tau_binade: Any
    tau_square: Any
    feedback: Any


class Found(NamedTuple):
    """The scratch: local place, r and v of those that passed; position and count of every tile's in it.

    known: bits of the largest |r| of the tensor that was known when the tile was looked at.
    """

    place: Any
    residual: Any
    variance: Any
    position: Any
    count: Any
    known: Any


class Sums(NamedTuple):
    """Zeroed before the first kernel: places taken of the pool and of the reserve; whether there is a bad value.

    By tensor: bits of the largest |r| [K, APART], of which the first counts; candidates [K, APART], to be added up;
    how many of each class [K, 8]. Programs that raise the same word, or one beside it, wait for each other.
    """

    taken: Any
    bad: Any
    tops: Any
    asked: Any
    totals: Any


class Plan(NamedTuple):
    """numbers: step * GOLDEN, eights in the scratch, capacity [K]. limits [K, 4]: cut class, its room, before, total.

    histogram: classes by tile; by_group: classes by group; prefix [G]: of the cut class, in the tensor's groups before;
    begin [G]: words of the group, then (`scan`) of all before it;
    kind [G]: who is sent: ALL candidates, all in the WINDOW (the others have been given back), or CHOSEN ones;
    before [T]: words of the group before the tile, unless some are chosen.
    """

    numbers: Any
    limits: Any
    histogram: Any
    by_group: Any
    prefix: Any
    begin: Any
    kind: Any
    before: Any


class EncodeOutputs(NamedTuple):
    """What `Selection` holds."""

    words: Any
    counts: Any
    codes: Any
    exponents: Any
    passed: Any
    finite: Any


@triton.jit
def is_live(cut, slot):
    """Whether a tensor has a gradient."""
    live = True
    if cut.live is not None:
        live = tl.load(cut.live + slot) != 0
    return live


@triton.jit
def variance_of(held, at, have, base=0):
    """v at some places from `base` on, 0 but for those we `have` (None: all of them), and 0 where it does not count."""
    v = tl.zeros_like(at).to(tl.float32)
    if held.variance is not None:
        v = tl.load(held.variance + base + at, mask=have, other=None if have is None else 0.0)
    return v


@triton.jit
def read(held, at, have, base=0):
    """r and v."""
    r = tl.load(held.residual + base + at, mask=have, other=None if have is None else 0.0)
    return r, variance_of(held, at, have, base)


@triton.jit
def write(held, at, r, v, have, base=0):
    """r, and v where it counts."""
    tl.store(held.residual + base + at, r, mask=have)
    if held.variance is not None:
        tl.store(held.variance + base + at, v, mask=have)


@triton.jit
def passing(a, b, least, slot, rule):
    """Elements of tensor `slot`: r + g, v + m."""
    if rule.limit is None:
        clear = a * a > b * rule.alpha + rule.floor_square
    else:  # limits.py says why a comparison of floats has the same result as one of bits
        clear = a * a - b * rule.alpha >= tl.load(rule.limit + slot)
    return clear & (tl.abs(a) >= least)


@triton.jit
def summed(given, state, at, inside, base):
    """(r + g, v + m, who is finite) of some places; a bad value adds nothing.

    inside: None of a whole tile, because a mask that could end anywhere makes every load 4 bytes wide.
    No hints to the cache: with evict_first for g and m all of `stream` took 1.79 ms instead of 1.63 (H200, ratio 10).
    """
    r, v = read(state, at, inside, base)
    g, m = read(given, at, inside, base)
    a, b = r + g, v + m
    good = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))
    return tl.where(good, a, r), tl.where(good, b, v), good


@triton.jit
def exponent_of(top, rule):
    """Biased exponent of a tensor from the bits of its largest |r|."""
    if rule.unbiased:
        top += rule.half
    return tl.minimum(top >> 23, 254)


@triton.jit
def least_sent(known, rule):
    """The smallest |r| that can be sent if the tensor's largest one is at least `known` (bits)."""
    if rule.hybrid:
        return rule.least
    bound = ((exponent_of(known, rule) - 7) << 23) - rule.half
    return tl.maximum(tl.maximum(bound, 0).to(tl.float32, bitcast=True), rule.least)


@triton.jit
def class_of(bits, top, rule):
    """0 is the largest; with tau: how many binades |r| is above it, 7 at the end. 8: not in the window."""
    size = bits & MAGNITUDE
    if rule.hybrid:
        return 7 - tl.minimum((size >> 23) - rule.tau_binade, 7)
    return tl.minimum(tl.maximum(top - ((size + rule.half) >> 23), 0), DROPPED)


@triton.jit
def overlap(low, count, limits):
    """How many of low .. low + count - 1 lie in the window before .. before + room - 1 modulo total."""
    _, room, before, total = limits
    high = low + count
    one = tl.minimum(high, before + room) - tl.maximum(low, before)
    two = tl.minimum(high, before + room - total) - tl.maximum(low, before - total)
    return tl.maximum(one, 0) + tl.maximum(two, 0)


@triton.jit
def limits_of(plan, slot):
    at = plan.limits + slot * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def is_short(slot, sums, plan):
    """Whether a tensor has more candidates than room: only then somebody has to know their classes beforehand."""
    asked = tl.sum(tl.load(sums.asked + slot * APART + tl.arange(0, APART)))
    return asked > tl.load(plan.numbers + 2 + slot)


@triton.jit
def tally(classes, counted):
    """One more in the counter of its class: eight counters of eight bits in an int64, for `counters`."""
    return tl.where(counted, 1, 0).to(tl.int64) << (8 * (classes & 7)).to(tl.int64)


@triton.jit
def unfolded(even, odd):
    """Sums of four counters each, of sixteen bits, to int32 [.., 8]."""
    column = tl.arange(0, CLASSES)
    return ((tl.where((column & 1) == 1, odd, even) >> (16 * (column >> 1)).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def counters(packed):
    """Sums of tallies [rows, lanes] along the rows: int32 [rows, 8]. A lane counts less than 256."""
    even = tl.sum(packed & 0x00FF00FF00FF00FF, axis=1)
    odd = tl.sum((packed >> 8) & 0x00FF00FF00FF00FF, axis=1)
    return unfolded(even[:, None], odd[:, None])


@triton.jit
def total_of(packed, most: tl.constexpr):
    """Sum of tallies [rows, lanes] of at most `most` candidates: int32 [8]. With few it takes `emit` a third fewer
    instructions to add up what is packed."""
    if most >= 1 << 16:
        total = tl.sum(counters(packed), axis=0)
    else:
        total = unfolded(tl.sum(packed & 0x00FF00FF00FF00FF), tl.sum((packed >> 8) & 0x00FF00FF00FF00FF))
    return total


@triton.jit
def spilled_part(tile, slot, start, top, state, cut, rule):
    """(class or 8, r, v, lanes inside) of SPAN places of a tile that is not in the scratch."""
    lane = start + tl.arange(0, SPAN)
    inside = (lane >= tl.load(cut.low + tile)) & (lane < tl.load(cut.high + tile))
    r, v = read(state, lane, inside, tl.load(cut.base + tile))
    classes = class_of(r.to(tl.int32, bitcast=True), top, rule)
    return tl.where(passing(r, v, rule.least, slot, rule), classes, DROPPED), r, v, inside

"""Steps 2 to 4 for CUDA: from a gradient to the message that is sent. Launchers; nothing here waits for the device.

The kernels that choose and write words are in stream.py, share.py and emit.py, with a density also in scores.py; words
become a body in pack.py, a body a message in head.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gradwire.codec import reference
from gradwire.codec.form import Shape
from gradwire.codec.gpu import emit as emitting
from gradwire.codec.gpu import records as kinds
from gradwire.codec.gpu import share as sharing
from gradwire.codec.gpu import stream as streaming
from gradwire.codec.gpu.head import seal
from gradwire.codec.gpu.pack import pack
from gradwire.codec.gpu.scores import limited
from gradwire.codec.header import Parts
from gradwire.codec.interface import GOLDEN, ROUNDING, SMALLEST, WINDOW, Inputs, Rule, Selection
from gradwire.compile.launching import UNFUSED
from gradwire.compile.tiles import Tiles, on_device, tiles_of
from gradwire.layout import Layout

# Places of a tile, tiles of a group. H200, 2^28 elements, ratio 10, stream alone: 1.63 ms; tiles of 1024 with 4 warps
# take 1.67. With 64 registers a multiprocessor has 32 warps; with 48 there are spills, 80 are too many: 1.70 both.
TILE, GROUP = 2048, 32
STREAM = {"num_warps": 8, "maxnreg": 64}
# Tiles that a program of `emit` looks at together, candidates of each; for tiles of few candidates and of more than
# MANY. H200, ratio 10: 105 us with (8, 32, 2), 117 with (32, 32, 4), 154 with (8, 64, 4); ratio 100: 26 us with
# (32, 16, 4), 30 with (16, 16, 2).
EMIT = {"rows": 32, "lanes": 16, "num_warps": 4}
EMIT_MANY, MANY = {"rows": 8, "lanes": 32, "num_warps": 2}, 64
LANES = 16  # candidates of a tile that `classify` looks at together
MOST_FOUND = (1 << 31) - (1 << 20)  # positions in the scratch are int32
SCAN = 4096  # groups that the one program of `scan` looks at together
APART = kinds.APART.value


def encode(inputs: Inputs, shape: Shape, rule: Rule, step: int) -> tuple[Tensor, Selection]:
    """As `reference.encode`."""
    chosen = select(inputs, shape.layout, rule, shape.capacity, step, shape.chunk)
    orders, body, counts = None, chosen.words, chosen.counts
    if shape.blocks is not None:
        orders, body = pack(chosen.words, counts, chosen.codes, shape.blocks, shape.chunk)
        counts = torch.zeros_like(counts)  # its blocks count for themselves
    return seal(shape, step, Parts(chosen.finite, counts, chosen.passed, chosen.exponents, orders, body)), chosen


def select(inputs: Inputs, layout: Layout, rule: Rule, capacity: Sequence[int], step: int, chunk: int) -> Selection:
    """As `reference.select`: one pass over the bucket (with a density, two), then short kernels over who passed."""
    assert TILE < 256 * LANES, "a lane counts its candidates of a class in eight bits"
    grad, moment, residual, variance, active = inputs
    tiles = tiles_of(layout, residual.device, chunk, TILE, GROUP)
    if not tiles.n_tiles:
        return reference.select(inputs, layout, rule, capacity, step, chunk)
    given, state, cut = kinds.Held(grad, moment), kinds.Held(residual, variance), tiles.table_with(active)
    terms, (found, sums, plan) = _terms(rule), _workspace(tiles, step, capacity, state)
    if rule.density is not None:
        terms = limited(given, state, cut, terms, tiles, layout, rule)
    report = _outputs(sum(capacity), tiles, residual.device)
    records = (state, cut, terms, found, sums, plan)
    sizes, by_group = {"size": TILE, "group": GROUP}, (tiles.n_groups,)
    for visit, whole in ((tiles.whole, True), (tiles.ragged, False)):
        streamed = (given, *records, kinds.Visit(*visit))
        streaming.stream_kernel[(len(visit[0]),)](*streamed, whole=whole, **sizes, **STREAM, **UNFUSED)
    streaming.classify_kernel[by_group](*records, lanes=LANES, **sizes, **UNFUSED)
    sharing.share_kernel[(tiles.n_slots,)](*records, report, **sizes, num_warps=8, **UNFUSED)
    sharing.scan_kernel[(1,)](cut, sums, plan, report, tiles.n_groups, tiles.n_chunks, width=SCAN, num_warps=8)
    n_words = len(report.words)
    block = EMIT_MANY if n_words * TILE > MANY * layout.numel else EMIT
    emitting.emit_kernel[(tiles.n_tiles // block["rows"],)](*records, report, **block, **sizes, **UNFUSED)
    lanes = block["lanes"]
    emitting.emit_cut_kernel[by_group](*records, report, n_words, lanes=lanes, **sizes, **UNFUSED)

    def undo() -> None:
        emitting.put_back_kernel[by_group](state, cut, found, lanes=lanes, **sizes)

    words, counts, codes, exponents, passed, finite = report
    return Selection(words, counts, codes, exponents, passed, finite.view(torch.bool).squeeze(0), undo)


def _outputs(n_words: int, tiles: Tiles, device: torch.device) -> kinds.EncodeOutputs:
    sizes = (n_words, tiles.n_chunks, (tiles.n_slots, WINDOW + 1), tiles.n_slots, tiles.n_slots)
    made = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
    made.append(torch.empty(1, dtype=torch.uint8, device=device))
    return kinds.EncodeOutputs(*made)


def _workspace(
    tiles: Tiles, step: int, capacity: Sequence[int], state: kinds.Held
) -> tuple[kinds.Found, kinds.Sums, kinds.Plan]:
    """Memory of their own for the kernels of one encode."""
    device, n_slots, n_tiles, n_groups = state.residual.device, tiles.n_slots, tiles.n_tiles, tiles.n_groups
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    eights, n_found = _room(tiles, sum(capacity))
    variance = None if state.variance is None else empty(n_found, dtype=torch.float32)
    lists = (empty(n_found, dtype=torch.int16), empty(n_found, dtype=torch.float32), variance)
    found = kinds.Found(*lists, empty(n_tiles), empty(n_tiles), empty(n_tiles))
    n_zeros = APART + (APART + 4) * n_slots
    host = np.zeros(n_zeros + 2 + n_slots, np.int64)
    host[n_zeros:] = step * GOLDEN, eights, *capacity
    zeros = on_device(host, device)  # with the numbers, in one copy: a kernel that only writes zeros takes 3 us
    tops, asked, totals = (zeros[APART:].view(torch.int32)[APART * n_slots * i :] for i in range(3))
    sums = kinds.Sums(zeros[:2], zeros[2:3].view(torch.int32), tops, asked, totals)
    sizes = (4 * n_slots, 8 * n_tiles, 8 * n_groups, n_groups, n_groups + 1, n_groups, n_tiles)
    return found, sums, kinds.Plan(zeros[n_zeros:], *(empty(size) for size in sizes))


def _room(tiles: Tiles, n_words: int) -> tuple[int, int]:
    """Eights of candidates in the scratch, and its length: with a reserve for the sent elements of spilled tiles.

    Half as many again as can be sent, because some are below the window or without room; a tile takes whole eights.
    """
    most = -(-tiles.numel // 8) + tiles.n_tiles
    eights = min(most, (n_words + n_words // 2) // 8 + 2 * tiles.size + tiles.n_tiles, (MOST_FOUND - n_words) // 8)
    return eights, 8 * eights if eights == most else 8 * eights + n_words


def _terms(rule: Rule) -> kinds.RuleTerms:
    least, tau = np.float32(SMALLEST), np.float32(rule.tau or 0)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(tau, np.float32(np.inf))
    return kinds.RuleTerms(
        alpha=float(np.float32(rule.alpha)),
        zeta=float(np.float32(rule.zeta)),
        least=float(least),
        floor_square=float(np.float32(rule.floor) * np.float32(rule.floor)),
        limit=None,
        half=tl.constexpr(ROUNDING[rule.rounding]),
        unbiased=tl.constexpr(rule.rounding == "unbiased"),
        hybrid=tl.constexpr(rule.tau is not None),
        tau=float(tau),
        tau_binade=int(tau.view(np.int32) >> 23),
        tau_square=float(tau * tau),
        feedback=tl.constexpr(rule.feedback),
    )

"""Steps 2 to 4 for CUDA: from a gradient to the message that is sent. Launchers; nothing here waits for the device.

The kernels that choose and write words are in stream.py, share.py and emit.py, with a density also in scores.py; words
become a body in pack.py, a body a message in head.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gradwire.codec import words as wire_words
from gradwire.codec.form import Shape
from gradwire.codec.gpu import emit as emitting
from gradwire.codec.gpu import records as kinds
from gradwire.codec.gpu import share as sharing
from gradwire.codec.gpu import stream as streaming
from gradwire.codec.gpu.head import seal
from gradwire.codec.gpu.pack import pack
from gradwire.codec.gpu.scores import limited
from gradwire.codec.header import Parts
from gradwire.codec.interface import GOLDEN, ROUNDING, SMALLEST, WINDOW, Encoded, Inputs, Rule, Selection
from gradwire.compile.launching import UNFUSED
from gradwire.compile.tiles import Tiles, on_device, tiles_of
from gradwire.layout import Layout


@dataclass(frozen=True)
class Tiling:
    """How a bucket is cut: places of a tile, tiles of a group; warps of a program, registers of a thread."""

    size: int
    group: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class Batch:
    """What a program of `emit` looks at together: tiles, candidates of each; its warps."""

    rows: int
    lanes: int
    warps: int


# H200, 2^28 elements, ratio 10, stream alone: 1.63 ms; tiles of 1024 with 4 warps take 1.67. With 64 registers a
# multiprocessor has 32 warps; with 48 there are spills, 80 are too many: 1.70 both.
ENCODE = Tiling(size=2048, group=32, warps=8, registers=64)
# For tiles of few candidates and of more than MANY. H200, ratio 10: 105 us with (8, 32, 2), 117 with (32, 32, 4), 154
# with (8, 64, 4); ratio 100: 26 us with (32, 16, 4), 30 with (16, 16, 2).
EMIT, EMIT_MANY, MANY = Batch(32, 16, 4), Batch(8, 32, 2), 64
LANES = 16  # candidates of a tile that `classify` looks at together
MOST_FOUND = (1 << 31) - (1 << 20)  # positions in the scratch are int32
SCAN = 4096  # groups that the one program of `scan` looks at together
APART = kinds.APART.value


def encode(inputs: Inputs, shape: Shape, rule: Rule, step: int) -> Encoded:
    """As `reference.encode`."""
    chosen = select(inputs, shape.layout, rule, shape.capacity, step, shape.chunk)
    orders, body, counts = None, chosen.words, chosen.counts
    if shape.blocks is not None:
        orders, body = pack(chosen.words, counts, chosen.codes, shape.blocks, shape.chunk)
        counts = torch.zeros_like(counts)  # its blocks count for themselves
    message = seal(shape, step, Parts(chosen.finite, counts, chosen.passed, chosen.exponents, orders, body))
    places = functools.partial(wire_words.places, chosen.words, chosen.counts, shape.chunk)
    return Encoded(message, chosen.codes, chosen.exponents, chosen.passed, chosen.undo, places)


def select(
    inputs: Inputs,
    layout: Layout,
    rule: Rule,
    capacity: Sequence[int],
    step: int,
    chunk: int,
    tiling: Tiling = ENCODE,
) -> Selection:
    """As `reference.select`: one pass over the bucket (with a density, two), then short kernels over who passed."""
    assert tiling.size < 256 * LANES, "a lane counts its candidates of a class in eight bits"
    grad, moment, residual, variance, active = inputs
    tiles = tiles_of(layout, residual.device, chunk, tiling.size, tiling.group)
    n_words, n_slots = sum(capacity), len(layout)
    report = _report(n_words, n_slots, tiles.n_chunks, residual.device)
    if not tiles.n_tiles:
        return _nothing(report, active)
    moment = grad if moment is None else moment  # something to point at where v does not count
    held = kinds.Held(residual, residual if variance is None else variance)
    asked = (tiles, active, rule, step, capacity, held, variance is not None)
    state, cut, test, quantum, found, sums, plan = _records(*asked)
    if rule.density is not None:
        test = limited(grad, moment, state, cut, test, quantum, tiles, layout, rule, active is None)
    records = (state, cut, test, quantum, found, sums, plan)
    sizes, by_group = {"size": tiling.size, "group": tiling.group}, (tiles.n_groups,)
    many = {"num_warps": tiling.warps, "maxnreg": tiling.registers, **sizes, **UNFUSED}
    for visit, whole in ((tiles.whole, True), (tiles.ragged, False)):
        given = (grad, moment, *records, kinds.Visit(*visit))
        streaming.stream_kernel[(len(visit[0]),)](*given, all_live=active is None, whole=whole, **many)
    streaming.classify_kernel[by_group](*records, lanes=LANES, **sizes, **UNFUSED)
    sharing.share_kernel[(n_slots,)](*records, report, **sizes, num_warps=8, **UNFUSED)
    sharing.scan_kernel[(1,)](cut, sums, plan, report, tiles.n_groups, tiles.n_chunks, width=SCAN, num_warps=8)
    block = EMIT_MANY if n_words * tiling.size > MANY * layout.numel else EMIT
    _emit(records, report, tiles, block, sizes, rule.feedback)

    def undo() -> None:
        emitting.put_back_kernel[by_group](state, cut, quantum, found, lanes=block.lanes, **sizes)

    return _selection(report, undo)


def _emit(
    records: tuple[Any, ...],
    report: kinds.EncodeOutputs,
    tiles: Tiles,
    block: Batch,
    sizes: dict[str, int],
    feedback: bool,
) -> None:
    options: dict[str, Any] = {"feedback": feedback, "lanes": block.lanes, **sizes, **UNFUSED}
    rows = min(block.rows, tiles.group)
    grid = (tiles.n_groups * (tiles.group // rows),)
    emitting.emit_kernel[grid](*records, report, rows=rows, num_warps=block.warps, **options)
    emitting.emit_cut_kernel[(tiles.n_groups,)](*records, report, len(report.words), **options)


def _report(n_words: int, n_slots: int, n_chunks: int, device: torch.device) -> kinds.EncodeOutputs:
    sizes = (n_words, n_chunks, n_slots * (WINDOW + 1), n_slots, n_slots)
    made = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
    made.append(torch.empty(1, dtype=torch.uint8, device=device))
    return kinds.EncodeOutputs(*made)


def _selection(report: kinds.EncodeOutputs, undo: Callable[[], None]) -> Selection:
    words, counts, codes, exponents, passed, finite = report
    codes, finite = codes.view(-1, WINDOW + 1), finite.view(torch.bool).squeeze(0)
    return Selection(words, counts, codes, exponents, passed, finite, undo)


def _nothing(report: kinds.EncodeOutputs, active: Tensor | None) -> Selection:
    """Of a bucket without elements."""
    for tensor in report:
        tensor.zero_()
    report.exponents.fill_(-128)
    report.finite.fill_(1)
    if active is not None:
        report.passed.copy_(active.int() - 1)
    return _selection(report, lambda: None)


def _records(
    tiles: Tiles,
    active: Tensor | None,
    rule: Rule,
    step: int,
    capacity: Sequence[int],
    state: kinds.Held,
    weighed: bool,
) -> tuple[Any, ...]:
    """What all kernels of one encode are given: memory of their own, the geometry and the rule."""
    device, n_slots, n_tiles, n_groups = state.residual.device, tiles.n_slots, tiles.n_tiles, tiles.n_groups

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    eights, n_found = _room(tiles, sum(capacity))
    before = empty(n_found, torch.float32)
    lists = (empty(n_found, torch.int16), before, empty(n_found, torch.float32) if weighed else before)
    found = kinds.Found(*lists, empty(n_tiles), empty(n_tiles), empty(n_tiles))
    n_zeros = APART + (APART + 4) * n_slots
    host = np.zeros(n_zeros + 2 + n_slots, np.int64)
    host[n_zeros:] = step * GOLDEN, eights, *capacity
    zeros = on_device(host, device)  # with the numbers, in one copy: a kernel that only writes zeros takes 3 us
    tops, asked, totals = (zeros[APART:].view(torch.int32)[APART * n_slots * i :] for i in range(3))
    sums = kinds.Sums(zeros[:2], zeros[2:3].view(torch.int32), tops, asked, totals)
    sizes = (4 * n_slots, 8 * n_tiles, 8 * n_groups, n_groups, n_groups + 1, n_groups, n_tiles)
    plan = kinds.Plan(zeros[n_zeros:], *(empty(size) for size in sizes))
    return state, tiles.table_with(active), _test(rule), _quantum(rule, weighed), found, sums, plan


def _room(tiles: Tiles, n_words: int) -> tuple[int, int]:
    """Eights of candidates in the scratch, and its length: with a reserve for the sent elements of spilled tiles.

    Half as many again as can be sent, because some are below the window or without room; a tile takes whole eights.
    """
    most = -(-tiles.numel // 8) + tiles.n_tiles
    eights = min(most, (n_words + n_words // 2) // 8 + 2 * tiles.size + tiles.n_tiles, (MOST_FOUND - n_words) // 8)
    return eights, 8 * eights if eights == most else 8 * eights + n_words


def _test(rule: Rule) -> kinds.Test:
    """Without the limits of a density."""
    least, floor = np.float32(SMALLEST), np.float32(rule.floor)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(np.float32(rule.tau), np.float32(np.inf))
    alpha, zeta, bound, square = (float(np.float32(x)) for x in (rule.alpha, rule.zeta, least, floor * floor))
    return kinds.Test(alpha, zeta, bound, square, tl.constexpr(False), tl.constexpr(0))


def _quantum(rule: Rule, weighed: bool) -> kinds.Quantum:
    tau = np.float32(rule.tau or 0)
    constants = (ROUNDING[rule.rounding], rule.rounding == "unbiased", rule.tau is not None, weighed)
    half, unbiased, hybrid, weighs = (tl.constexpr(constant) for constant in constants)
    return kinds.Quantum(half, unbiased, hybrid, float(tau), int(tau.view(np.int32) >> 23), float(tau * tau), weighs)

"""The kernels for CUDA: launchers of the Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gradwire.kernels import triton_decode as decoding
from gradwire.kernels import triton_emit as emitting
from gradwire.kernels import triton_encode as encoding
from gradwire.kernels import triton_records as kinds
from gradwire.kernels import triton_share as sharing
from gradwire.kernels.gpu_compact import pack, starts_of, unpack
from gradwire.kernels.interface import GOLDEN, PROBLEMS, ROUNDING, SMALLEST, WINDOW, Rule, Selection
from gradwire.kernels.tiles import Tiles, on_device, tiles_of
from gradwire.layout import Layout

__all__ = ["add", "check", "checksum", "encode", "pack", "unpack"]


@dataclass(frozen=True)
class Shape:
    """How a bucket is cut: places of a tile, tiles of a group; warps of a program, registers of a thread."""

    size: int
    group: int
    warps: int
    registers: int | None = None


# H200, 2^28 elements, 1 in 100 sent: 1.70 ms; tiles of 4096 take 1.77, of 1024 1.73. With 64 registers a
# multiprocessor has 32 warps; the compiler would take 64 to 80.
ENCODE = Shape(size=2048, group=32, warps=8, registers=64)
ADD = Shape(size=8192, group=1, warps=4)
# Candidates of a tile looked at together. H200, emit, 1 in 10 sent: 103 us with 32, 156 with 16; 1 in 100: 24 and 18.
LANES, MANY_LANES, MANY = 16, 32, 64
ADDED = 128  # words of a rank at a time
MOST_FOUND = (1 << 31) - (1 << 20)  # positions in the scratch are int32
SCAN = 1024  # groups that the one program of `scan` looks at together
CLEARING, CLEARED = 264, 1024  # programs and words at a time of `clear`
CHECKED, SUMMED = 2048, 4096  # words that one program looks at
APART = kinds.APART.value
UNFUSED = {"enable_fp_fusion": False}  # a multiply-add rounds once, the reference twice


def encode(
    grad: Tensor,
    moment: Tensor,
    residual: Tensor,
    variance: Tensor,
    active: Tensor | None,
    layout: Layout,
    rule: Rule,
    capacity: Sequence[int],
    step: int,
    chunk: int,
    shape: Shape = ENCODE,
) -> Selection:
    """As `reference.encode`: one pass over the bucket, then short kernels over those that passed."""
    assert shape.size < 256 * LANES, "a lane counts its candidates of a class in eight bits"
    tiles = tiles_of(layout, residual.device, chunk, shape.size, shape.group)
    n_words, n_slots = sum(capacity), len(layout)
    report = _report(n_words, n_slots, tiles.n_chunks, residual.device)
    if not tiles.n_tiles:
        return _nothing(report, active)
    records = _records(tiles, active, rule, step, capacity, (residual, variance))
    state, cut, _test, _quantum, found, sums, plan = records
    sizes = {"size": shape.size, "group": shape.group}
    lanes = MANY_LANES if n_words * shape.size > MANY * layout.numel else LANES
    many = {"num_warps": shape.warps, "maxnreg": shape.registers, **sizes, **UNFUSED}
    for n_tiles, whole in ((tiles.n_tiles, True), (len(tiles.ragged), False)):
        inputs = (grad, moment, *records, tiles.ragged)
        encoding.stream_kernel[(n_tiles,)](*inputs, all_live=active is None, whole=whole, **many)
    by_group = (tiles.n_groups,)
    encoding.classify_kernel[by_group](*records, lanes=LANES, **sizes, **UNFUSED)
    sharing.share_kernel[(n_slots,)](*records, report, **sizes, num_warps=8, **UNFUSED)
    sharing.scan_kernel[(1,)](cut, sums, plan, report, tiles.n_groups, tiles.n_chunks, width=SCAN, num_warps=8)
    for kernel in (emitting.emit_kernel, emitting.emit_cut_kernel):
        kernel[by_group](*records, report, feedback=rule.feedback, lanes=lanes, **sizes, **UNFUSED)
    sharing.clear_kernel[(CLEARING,)](report.words, plan, tiles.n_groups, n_words, width=CLEARED)

    def undo() -> None:
        emitting.put_back_kernel[by_group](state, cut, found, lanes=lanes, **sizes)

    return _selection(report, undo)


def _report(n_words: int, n_slots: int, n_chunks: int, device: torch.device) -> kinds.Report:
    sizes = (n_words, n_chunks, n_slots * (WINDOW + 1), n_slots, n_slots)
    made = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
    made.append(torch.empty(1, dtype=torch.uint8, device=device))
    return kinds.Report(*made)


def _selection(report: kinds.Report, undo: Callable[[], None]) -> Selection:
    words, counts, codes, exponents, passed, finite = report
    codes, finite = codes.view(-1, WINDOW + 1), finite.view(torch.bool).squeeze(0)
    return Selection(words, counts, codes, exponents, passed, finite, undo)


def _nothing(report: kinds.Report, active: Tensor | None) -> Selection:
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
    state: tuple[Tensor, Tensor],
) -> tuple[Any, ...]:
    """What all kernels of one encode are given: memory of their own, the geometry and the rule."""
    device, n_slots, n_tiles, n_groups = state[0].device, tiles.n_slots, tiles.n_tiles, tiles.n_groups

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    live = tiles.all_live if active is None else active.view(torch.uint8)
    geometry = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin, tiles.first_of_slot)
    cut = kinds.Cut(*geometry, tiles.first_of_chunk, tiles.offset, tiles.length, live)
    room, n_found = _room(tiles, sum(capacity))
    lists = (empty(n_found, torch.int16), empty(n_found, torch.float32), empty(n_found, torch.float32))
    found = kinds.Found(*lists, empty(n_tiles), empty(n_tiles), empty(n_tiles))
    zeros = torch.zeros(APART + (APART + 4) * n_slots, dtype=torch.int64, device=device)
    tops, asked, totals = (zeros[APART:].view(torch.int32)[APART * n_slots * i :] for i in range(3))
    sums = kinds.Sums(zeros[:2], zeros[2:3].view(torch.int32), tops, asked, totals)
    numbers = on_device([step * GOLDEN, room, *capacity], device)
    sizes = (4 * n_slots, 8 * n_tiles, 8 * n_groups, n_groups, n_groups + 1, n_groups)
    plan = kinds.Plan(numbers, *(empty(size) for size in sizes))
    return kinds.State(*state), cut, _test(rule), _quantum(rule), found, sums, plan


def _room(tiles: Tiles, n_words: int) -> tuple[int, int]:
    """Candidates that the scratch has room for, and its length: with a reserve for the sent elements of spilled tiles.

    Half as many again as can be sent, because some are below the window or without room; a tile takes whole eights.
    """
    most = tiles.numel + 8 * tiles.n_tiles
    room = min(most, n_words + n_words // 2 + 16 * tiles.size + 8 * tiles.n_tiles, MOST_FOUND - n_words)
    return room, room if room == most else room + n_words


def _test(rule: Rule) -> kinds.Test:
    least, floor = np.float32(SMALLEST), np.float32(rule.floor)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(np.float32(rule.tau), np.float32(np.inf))
    return kinds.Test(*(float(np.float32(number)) for number in (rule.alpha, rule.zeta, least, floor * floor)))


def _quantum(rule: Rule) -> kinds.Quantum:
    tau = np.float32(rule.tau or 0)
    constants = (ROUNDING[rule.rounding], rule.rounding == "unbiased", rule.tau is not None)
    half, unbiased, hybrid = (tl.constexpr(constant) for constant in constants)
    return kinds.Quantum(half, unbiased, hybrid, float(tau), int(tau.view(np.int32) >> 23), float(tau * tau))


def check(words: Tensor, counts: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int) -> Tensor:
    """As `reference.check`."""
    found = torch.zeros(len(words), len(PROBLEMS), dtype=torch.uint8, device=words.device)
    tiles = tiles_of(layout, words.device, chunk, ADD.size, ADD.group)
    grid = (-(-words.shape[1] // CHECKED), len(words))
    if words.numel():
        n_slots, hybrid = len(layout), rule.tau is not None
        inputs = (words, words.stride(0), counts.contiguous(), exponents.contiguous(), tiles.end, found)
        numbers = (counts.shape[1], chunk, layout.numel, n_slots, n_slots.bit_length())
        decoding.check_kernel[grid](*inputs, *numbers, hybrid=hybrid, width=CHECKED, num_warps=8)
    return found.view(torch.bool)


def add(
    words: Tensor,
    counts: Tensor,
    exponents: Tensor,
    layout: Layout,
    rule: Rule,
    chunk: int,
    out: Tensor,
    shape: Shape = ADD,
) -> None:
    """As `reference.add`."""
    tiles = tiles_of(layout, out.device, chunk, shape.size, shape.group)
    if not tiles.n_tiles:
        return
    n_ranks, counts, exponents = len(words), counts.contiguous(), exponents.contiguous()
    ranks = 1 << (n_ranks - 1).bit_length()
    starts = starts_of(words, counts, tiles.base, tiles.low, tiles.origin, chunk)
    geometry = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin)
    values = (float(np.float32(rule.tau or 0)), 1 / n_ranks, n_ranks, tiles.n_slots)
    decoding.add_kernel[(tiles.n_tiles,)](
        words, words.stride(0), starts, exponents, *geometry, out, *values, hybrid=rule.tau is not None,
        size=shape.size, group=shape.group, lanes=ADDED, ranks=ranks, num_warps=shape.warps, **UNFUSED,
    )  # fmt: skip


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    rows = messages.reshape(-1, messages.shape[-1])
    total = torch.zeros(len(rows), dtype=torch.int64, device=messages.device)
    if rows.numel():
        grid = (-(-rows.shape[1] // SUMMED), len(rows))
        decoding.checksum_kernel[grid](rows, rows.stride(0), rows.shape[1], total, width=SUMMED)
    return total.view(*messages.shape[:-1], 1).view(torch.int32)

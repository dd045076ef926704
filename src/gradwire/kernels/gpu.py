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
from gradwire.kernels.interface import GOLDEN, PROBLEMS, ROUNDING, SMALLEST, WINDOW, Rule, Selection
from gradwire.kernels.tiles import Tiles, tiles_of
from gradwire.layout import Layout


@dataclass(frozen=True)
class Shape:
    """How a kernel is cut. size: places of a tile; group: tiles of a group; lanes: candidates of a tile at a time."""

    size: int = 4096
    group: int = 16
    lanes: int = 32
    warps: int = 8  # of the pass over all elements
    few_warps: int = 4  # of those over the candidates
    most_registers: int | None = None


ENCODE = Shape()
ADD = Shape(size=8192, group=1, lanes=128, warps=8)
CHECKED, SEARCHED, SUMMED = 2048, 128, 4096  # words, tiles of all ranks, words that one program looks at
MOST_FOUND = (1 << 31) - (1 << 20)  # positions in the scratch are int32
SCAN = 1024  # groups that the one program of `scan` looks at together
CLEARING, CLEARED = 264, 1024  # programs and words at a time of `clear`


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
    """As `reference.encode`: one pass over the bucket, then five short kernels over those that passed."""
    device = residual.device
    tiles = tiles_of(layout, device, chunk, shape.size, shape.group)
    n_words, n_slots = sum(capacity), len(layout)
    report = _report(n_words, n_slots, tiles.n_chunks, device)
    if not tiles.n_tiles:
        return _nothing(report, active)
    # more than the capacity, because what is below the window takes a place too; a tile takes whole eights
    room = min(layout.numel, n_words + n_words // 2 + 16 * shape.size) + 8 * tiles.n_tiles
    room = min(room, MOST_FOUND - n_words)
    records = _records(tiles, active, rule, [step * GOLDEN, room, *capacity], room, n_words, (residual, variance))
    state, cut, test, quantum, found, sums, plan = records
    sizes = {"size": shape.size, "group": shape.group}
    few = {"num_warps": shape.few_warps, "enable_fp_fusion": False}
    encoding.stream_kernel[(tiles.n_tiles,)](
        grad, moment, *records, all_live=active is None, **sizes, num_warps=shape.warps, enable_fp_fusion=False,
        maxnreg=shape.most_registers,
    )
    encoding.classify_kernel[(tiles.n_groups,)](*records, **sizes, lanes=shape.lanes, **few)
    emitting.share_kernel[(n_slots,)](*records, report, **sizes, num_warps=8, enable_fp_fusion=False)
    emitting.scan_kernel[(1,)](cut, sums, plan, report, tiles.n_groups, tiles.n_chunks, width=SCAN, num_warps=8)
    options = {"feedback": rule.feedback, "lanes": shape.lanes}
    emitting.emit_kernel[(tiles.n_groups,)](*records, report.words, **options, **sizes, **few)
    emitting.clear_kernel[(CLEARING,)](report.words, plan, tiles.n_groups, n_words, width=CLEARED)

    def undo() -> None:
        emitting.put_back_kernel[(tiles.n_groups,)](state, cut, found, **sizes, lanes=shape.lanes)

    return _selection(report, undo)


def _report(n_words: int, n_slots: int, n_chunks: int, device: torch.device) -> emitting.Report:
    sizes = (n_words, n_chunks, n_slots * (WINDOW + 1), n_slots, n_slots)
    made = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
    return emitting.Report(*made, torch.empty(1, dtype=torch.uint8, device=device))


def _selection(report: emitting.Report, undo: Callable[[], None]) -> Selection:
    words, counts, codes, exponents, passed, finite = report
    codes, finite = codes.view(-1, WINDOW + 1), finite.view(torch.bool).squeeze(0)
    return Selection(words, counts, codes, exponents, passed, finite, undo)


def _nothing(report: emitting.Report, active: Tensor | None) -> Selection:
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
    numbers: list[int],
    room: int,
    n_words: int,
    state: tuple[Tensor, Tensor],
) -> tuple[Any, ...]:
    """What all kernels of one encode are given: memory of their own, the geometry and the rule."""
    device, n_slots, n_tiles, n_groups = state[0].device, tiles.n_slots, tiles.n_tiles, tiles.n_groups

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    live = tiles.all_live if active is None else active.view(torch.uint8)
    geometry = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin, tiles.first_of_slot)
    cut = encoding.Cut(*geometry, tiles.first_of_chunk, tiles.offset, tiles.length, live)
    n_found = room if room >= tiles.numel else room + n_words  # the reserve is for spilled tiles
    lists = (empty(n_found, torch.int16), empty(n_found, torch.float32), empty(n_found, torch.float32))
    found = encoding.Found(*lists, empty(n_tiles), empty(n_tiles))
    zeros = torch.zeros(3 + (9 * n_slots + 1) // 2, dtype=torch.int64, device=device)
    small = zeros[3:].view(torch.int32)
    sums = encoding.Sums(zeros[:2], zeros[2:3].view(torch.int32), small[:n_slots], small[n_slots:])
    lists = (empty(4 * n_slots), empty(8 * n_tiles), empty(8 * n_groups), empty(n_groups), empty(n_groups + 1))
    plan = encoding.Plan(on_device(numbers, device), *lists)
    return encoding.State(*state), cut, _test(rule), _quantum(rule), found, sums, plan


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n]. From pinned memory: a copy from any other would wait for the device."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _test(rule: Rule) -> encoding.Test:
    least, floor = np.float32(SMALLEST), np.float32(rule.floor)
    if rule.tau is not None:  # |r| > tau
        least = np.nextafter(np.float32(rule.tau), np.float32(np.inf))
    return encoding.Test(*(float(np.float32(number)) for number in (rule.alpha, rule.zeta, least, floor * floor)))


def _quantum(rule: Rule) -> encoding.Quantum:
    tau = np.float32(rule.tau or 0)
    constants = (ROUNDING[rule.rounding], rule.rounding == "unbiased", rule.tau is not None)
    numbers = (float(tau), int(tau.view(np.int32) >> 23), float(tau * tau))
    return encoding.Quantum(*(tl.constexpr(constant) for constant in constants), *numbers)


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
    starts = torch.empty(tiles.n_tiles + 1, n_ranks, dtype=torch.int32, device=out.device)
    numbers = (n_ranks, tiles.n_tiles, counts.shape[1], chunk, words.shape[1].bit_length())
    ranks = 1 << (n_ranks - 1).bit_length()
    width = max(1, SEARCHED // ranks)
    decoding.starts_kernel[(tiles.n_tiles // width + 1,)](
        words, words.stride(0), counts, tiles.base, tiles.low, tiles.origin, starts, *numbers,
        group=shape.group, width=width, ranks=ranks, num_warps=4,
    )  # fmt: skip
    geometry = (tiles.base, tiles.low, tiles.high, tiles.slot, tiles.origin)
    values = (float(np.float32(rule.tau or 0)), 1 / n_ranks, n_ranks, tiles.n_slots)
    decoding.add_kernel[(tiles.n_tiles,)](
        words, words.stride(0), starts, exponents, *geometry, out, *values, hybrid=rule.tau is not None,
        size=shape.size, group=shape.group, lanes=shape.lanes, num_warps=shape.warps, enable_fp_fusion=False,
    )  # fmt: skip


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    rows = messages.reshape(-1, messages.shape[-1])
    total = torch.zeros(len(rows), dtype=torch.int64, device=messages.device)
    if rows.numel():
        grid = (-(-rows.shape[1] // SUMMED), len(rows))
        decoding.checksum_kernel[grid](rows, rows.stride(0), rows.shape[1], total, width=SUMMED)
    return total.view(*messages.shape[:-1], 1).view(torch.int32)

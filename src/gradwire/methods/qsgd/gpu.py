"""QSGD for CUDA: the bits of definition.py in one pass over the gradient; plain torch makes some sixty.

`write_kernel` makes norms and codes, `pack_kernel` puts the codes into words, which do not begin where groups begin;
`put_kernel` adds up the words of all ranks. A program of the first and the last works on `rows` whole groups, each
padded to `width`, a power of two.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.arithmetic.draws_gpu import chance, draw, load_key, table_of
from gradwire.arithmetic.groups import Array, ScaleGroups
from gradwire.codec import fields
from gradwire.compile.launching import UNFUSED
from gradwire.compile.tiles import on_device

WIDEST = 8192  # elements of a group that a program of `write_kernel` holds in registers
WRITTEN, ADDED = 512, 256  # elements of a warp of each kernel: 16 and 8 a thread; 96 and 64 registers
MOST_ADDED = 1024  # elements that a program of `put_kernel` looks at together
WORDS = 256  # of a program of `pack_kernel`
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32


@triton.jit
def load_groups(table, n_groups, rows: tl.constexpr):
    """This program's groups [rows], which of them there are, where they begin and how long they are [rows, 1]."""
    group = tl.program_id(0) * rows + tl.arange(0, rows)
    ours = group < n_groups
    begin = tl.load(table.begin + group, mask=ours, other=0)
    length = tl.load(table.length + group, mask=ours, other=0)
    return group, ours, begin[:, None], length[:, None]


@triton.jit
def folded(values, rows: tl.constexpr, width: tl.constexpr, n_halvings: tl.constexpr):
    """[rows, width] -> [rows], added in the order of ScaleGroups.folded: a sum of two has only one order."""
    for halving in tl.static_range(n_halvings):
        values = tl.sum(tl.reshape(values, (rows, 2, width >> (halving + 1))), axis=1)
    return tl.reshape(values, (rows,))


@triton.jit
def norm_of(value, largest: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, n_halvings: tl.constexpr):
    """float32 [rows]: as QSGD.norms."""
    if largest:
        return tl.max(tl.abs(value), axis=1)
    exact = value.to(tl.float64)
    return tl.minimum(tl.sqrt(folded(exact * exact, rows, width, n_halvings)), LARGEST).to(tl.float32)


@triton.jit(do_not_specialize=["n_slots", "n_groups"])
def write_kernel(
    grad, table, keys, n_slots, n_groups, norms, codes, sent,
    bits: tl.constexpr, largest: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, n_halvings: tl.constexpr,
):  # fmt: skip
    """norms [G], codes uint8 [N], sent float32 [programs]: |sent|_1 of this one's groups."""
    group, ours, begin, length = load_groups(table, n_groups, rows)
    lane = tl.arange(0, width)[None, :]
    at, inside = begin + lane, lane < length
    value = tl.load(grad + at, mask=inside, other=0.0)
    norm = norm_of(value, largest, rows, width, n_halvings)
    tl.store(norms + group, norm, mask=ours)
    levels: tl.constexpr = (1 << (bits - 1)) - 1
    divisor = tl.where(norm > 0, norm, 1.0)[:, None]  # where the norm is zero, so is every element
    size = tl.minimum(tl.div_rn(tl.abs(value), divisor) * levels, levels)
    whole = tl.floor(size)
    first, second = load_key(keys, tl.load(table.slot + group, mask=ours, other=0), n_slots, ours)
    up = chance(draw(at, first[:, None], second[:, None])) < size - whole
    level = whole.to(tl.int32) + up.to(tl.int32)
    code = level | (((value < 0) & (level > 0)).to(tl.int32) << (bits - 1))
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    of_groups = tl.sum(level, axis=1).to(tl.float64) * norm.to(tl.float64)
    tl.store(sent + tl.program_id(0), (tl.sum(of_groups) * (1.0 / levels)).to(tl.float32))


@triton.jit(do_not_specialize=["n_codes", "n_words"])
def pack_kernel(
    codes, words, n_codes: tl.int64, n_words: tl.int64,
    bits: tl.constexpr, each: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """As fields.reference_pack: `each` codes a word, here padded to `columns`, a power of two.

    There is memory for whole words of codes, so that loads are as wide as a word's codes.
    """
    word = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    at = word[:, None] * each + column
    code = tl.load(codes + at, mask=(column < each) & (word < n_words)[:, None], other=0).to(tl.int32)
    packed = tl.sum(tl.where(at < n_codes, code << (bits * column), 0), axis=1)
    tl.store(words + word, packed, mask=word < n_words)


@triton.jit(do_not_specialize=["stride", "n_ranks", "n_groups"])
def put_kernel(
    norms, words, stride: tl.int64, n_ranks, table, n_groups, share, out, bad,
    bits: tl.constexpr, each: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """out = what all ranks' words say, added in rank order; nothing is written if bad [].

    Every element looks for its own word: those of a word lie in one warp, for which it is loaded once.
    """
    group, ours, begin, length = load_groups(table, n_groups, rows)
    length = tl.where(tl.load(bad) == 0, length, 0)
    levels: tl.constexpr = (1 << (bits - 1)) - 1
    for start in tl.range(0, tl.max(length), width):
        lane = start + tl.arange(0, width)[None, :]
        inside = lane < length
        field = (begin % each).to(tl.int32) + lane
        word, shift = begin // each + field // each, bits * (field % each)
        total = tl.zeros((rows, width), tl.float32)
        for rank in tl.range(0, n_ranks):
            unit = tl.load(norms + rank * stride + group, mask=ours, other=0.0) * share
            code = tl.load(words + rank * stride + word, mask=inside, other=0) >> shift & (2 * levels + 1)
            value = (code & levels).to(tl.float32) * unit[:, None]
            total += tl.where(code > levels, -value, value)
        tl.store(out + begin + lane, total, mask=inside)


def serves(groups: ScaleGroups) -> bool:
    """Wider groups are for plain torch: a program holds a whole one."""
    return groups.size is not None and groups.size <= WIDEST


def write(grad: Tensor, groups: ScaleGroups, keys: Array, bits: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The body, and |sent|_1; keys: draws.keys."""
    device, n_groups, each = grad.device, len(groups), 32 // bits
    n_words, (rows, width) = fields.n_words(len(grad), bits), _cut(groups, WIDEST)
    n_programs, n_halvings = triton.cdiv(n_groups, rows), width.bit_length() - 1
    body = torch.empty(n_groups + n_words, dtype=torch.int32, device=device)
    codes = torch.empty(n_words * each, dtype=torch.uint8, device=device)
    sent = torch.empty(n_programs, dtype=torch.float32, device=device)
    given = (grad, table_of(groups, device), on_device(keys, device), len(groups.layout), n_groups)
    made = (body[:n_groups].view(torch.float32), codes, sent)
    # a group in one warp where it can be: sums across warps go through shared memory
    warps = max(1, width // WRITTEN)
    write_kernel[(n_programs,)](*given, *made, bits, largest, rows, width, n_halvings, num_warps=warps, **UNFUSED)
    grid, columns = (triton.cdiv(n_words, WORDS),), triton.next_power_of_2(each)
    pack_kernel[grid](codes, body[n_groups:], len(grad), n_words, bits, each, columns, WORDS)
    return body, sent.sum()


def put(norms: Tensor, words: Tensor, share: float, groups: ScaleGroups, bits: int, out: Tensor, bad: Tensor) -> None:
    """out = the sum over the ranks of what norms [W, G] times `share` and words say; it stays as it is if bad []."""
    n_groups, (rows, width) = len(groups), _cut(groups, MOST_ADDED)
    given = (norms, words, norms.stride(0), len(norms), table_of(groups, out.device), n_groups, share)
    grid, warps = (triton.cdiv(n_groups, rows),), rows * width // ADDED
    put_kernel[grid](*given, out, bad.view(torch.uint8), bits, 32 // bits, rows, width, num_warps=warps, **UNFUSED)


def _cut(groups: ScaleGroups, widest: int) -> tuple[int, int]:
    """(rows, width): groups of a program, and elements of each that it looks at together."""
    assert groups.size is not None
    width = min(triton.next_power_of_2(groups.size), widest)
    return max(1, WRITTEN // width), width

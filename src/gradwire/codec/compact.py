"""The compact format: about 1.05 of Shannon's bound, not 32 bits an element. Plain torch: the definition of right.

docs/wire-format.md specifies it. In short: a bucket is cut into blocks (form.py); a directory says how long each
block's payload is; a payload is a count c and four planes: the low k bits of every gap, sign and class of every code,
the high part of every gap in unary, the extra bits of every code. cpu/ and gpu/ give the same bytes, fast.
B blocks, K tensors, n elements; positions are bits from the start of the body.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.compact_bits import SPARE, BlockRuns, deposit, fetch, floor_log2, signed, unsigned
from gradwire.codec.form import Blocks, Tables
from gradwire.errors import MessageError

SKEWED = 1 << 24  # the bit of an order word that says which shape
FIRST_SYMBOL = ((0, 2, 4, 6), (0, 1, 2, 4))  # [shape][class]: even, skewed
EXTRA_BITS = ((1, 1, 1, 1), (0, 0, 1, 2))  # [shape][class]
SYMBOL_CLASS = ((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 2, 3, 3, 3, 3))  # [shape][symbol]

PROBLEMS = (  # what is wrong with a message, by number
    "",
    "the order of a tensor's codes is no permutation of 0..7 with a shape bit (with tau: not 0)",
    "the payloads that the directory names are longer than the payload area",
    "a block counts more elements than it has places",
    "a tensor has more elements than its capacity",
    "a block's payload is too short for its elements",
    "a block's unary plane has fewer ones than elements",
    "a place lies outside its block",
    "a block's payload is not as long as its planes",
    "there are bits behind the end of the directory or of a payload",
)


def refusal(problem: int) -> MessageError:
    return MessageError(f"this is no compact message for this bucket: {PROBLEMS[problem]}")


@dataclass(frozen=True)
class Planes:
    """Where the parts of each block's payload begin, int64 [B]. The extra plane follows the unary plane."""

    start: Tensor
    low_bits: Tensor  # k
    low: Tensor
    code: Tensor
    unary: Tensor

    @classmethod
    def of(cls, start: Tensor, count: Tensor, tables: Tables, code_bits: int) -> Planes:
        low_bits = floor_log2((tables.length - count) // count.clamp(min=1))
        low = start + tables.count_bits
        code = low + count * low_bits
        return cls(start, low_bits, low, code, code + count * code_bits)


def pack(index: Tensor, code: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Places int64 [n], ascending, and codes int32 [n] to orders int32 [K] and the body, int32 [blocks.words].

    Not checked: the places lie in tensors with capacity, no tensor has more elements than that, codes have 4 bits.
    """
    tables, code_bits = blocks.tables(index.device), _code_bits(blocks)
    block = torch.bucketize(index, tables.begin, right=True) - 1
    runs = BlockRuns(torch.bincount(block, minlength=blocks.count), block)
    ordinal = runs.ordinal()
    before = torch.where(ordinal == 0, tables.begin[block] - 1, index.roll(1))
    gap = index - before - 1
    orders = _orders(tables.tensor[block], code, blocks)
    sign_class, extra, extra_bits = classify(code, orders[tables.tensor[block]], blocks)

    sizes = Planes.of(torch.zeros_like(runs.count), runs.count, tables, code_bits)
    low_bits = sizes.low_bits[block]
    unary_bits = (gap >> low_bits) + 1
    bits = sizes.unary + runs.totals(unary_bits) + runs.totals(extra_bits)
    size = torch.where(runs.count > 0, (bits + 31) // 32, 0)
    end = size.cumsum(0)
    assert not bool((end > blocks.payload_words).any()), "room_words proves that this cannot be"

    words = torch.zeros(blocks.words + SPARE, dtype=torch.int64, device=index.device)
    deposit(words, tables.entry, size)
    planes = Planes.of((blocks.directory_words + end - size) * 32, runs.count, tables, code_bits)
    filled = runs.count > 0
    deposit(words, planes.start[filled], runs.count[filled] - 1)
    deposit(words, planes.low[block] + ordinal * low_bits, gap & ((1 << low_bits) - 1))
    deposit(words, planes.code[block] + ordinal * code_bits, sign_class)
    deposit(words, planes.unary[block] + runs.sums(unary_bits) - 1, torch.ones_like(gap))
    extra_plane = planes.unary + runs.totals(unary_bits)
    deposit(words, extra_plane[block] + runs.sums(extra_bits) - extra_bits, extra)
    return orders, signed(words[:-SPARE])


def orders_of(frequency: Tensor) -> Tensor:
    """How often each d was sent, int64 [K, 8], to the order words, int32 [K].

    The values of d by falling frequency, 3 bits each, and the shape: skewed where that is strictly cheaper.
    """
    frequency, order = frequency.sort(dim=1, descending=True, stable=True)  # ties: smaller d first
    word = (order << (3 * torch.arange(8, device=order.device))).sum(1)
    extra_bits = _table(EXTRA_BITS, order).gather(1, _table(SYMBOL_CLASS, order))
    even, skewed = (frequency[:, None] * extra_bits).sum(2).unbind(1)
    return torch.where(skewed < even, word | SKEWED, word).int()


def unpack(orders: Tensor, body: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Places int64 [n], ascending, and codes int32 [n]. Any bits may come: MessageError if they are no message."""
    check_lengths(orders, body, blocks)
    _check_orders(orders, blocks)
    tables, code_bits = blocks.tables(body.device), _code_bits(blocks)
    words = _readable(body)
    start, stop, count = _read_directory(words, tables, blocks)
    planes = Planes.of(start, count, tables, code_bits)
    if bool(((count > 0) & (planes.unary + count > stop)).any()):
        raise refusal(5)
    runs = BlockRuns.of(count)
    block, ordinal = runs.block, runs.ordinal()
    low_bits = planes.low_bits[block]
    low = fetch(words, planes.low[block] + ordinal * low_bits, low_bits)
    sign_class = fetch(words, planes.code[block] + ordinal * code_bits, code_bits)
    one = _find_ones(words, planes.unary, stop, count)
    zeros = one - planes.unary[block] - ordinal
    place = (zeros << low_bits) + runs.sums(low + 1) - 1
    if bool((place >= tables.length[block]).any()):
        raise refusal(7)

    order = orders[tables.tensor[block]].long()
    first_symbol, extra_bits = _classes(sign_class >> 1, order, blocks)
    extra_plane = planes.unary.scatter_reduce(0, block, one + 1, "amax")
    _check_end(words, extra_plane + runs.totals(extra_bits), stop, count, blocks)
    extra = fetch(words, extra_plane[block] + runs.sums(extra_bits) - extra_bits, extra_bits)
    distance = (order >> (3 * (first_symbol + extra))) & 7
    return tables.begin[block] + place, ((sign_class & 1) << 3 | distance).int()


def ends_of(body: Tensor, blocks: Blocks) -> Tensor:
    """What the directory says: where each block's payload ends, in words from the first payload on; int64 [B]."""
    tables = blocks.tables(body.device)
    return fetch(_readable(body), tables.entry, tables.entry_bits).cumsum(0)


def _readable(body: Tensor) -> Tensor:
    return torch.cat([unsigned(body), body.new_zeros(SPARE, dtype=torch.int64)])


def _code_bits(blocks: Blocks) -> int:
    return 1 if blocks.hybrid else 3


def _table(rows: tuple[tuple[int, ...], ...], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _orders(tensor: Tensor, code: Tensor, blocks: Blocks) -> Tensor:
    if blocks.hybrid:
        return torch.zeros(len(blocks.layout), dtype=torch.int32, device=code.device)
    frequency = torch.bincount(tensor * 8 + (code & 7), minlength=len(blocks.layout) * 8)
    return orders_of(frequency.view(-1, 8))


def _by_tensor(count: Tensor, tables: Tables) -> Tensor:
    return torch.zeros_like(tables.capacity).index_add_(0, tables.tensor, count)


def classify(code: Tensor, order: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """What each code becomes: sign | class << 1, the extra bits' value, and how many they are. int64 [n] each."""
    sign, distance = code.long() >> 3, code.long() & 7
    if blocks.hybrid:
        return sign, torch.zeros_like(sign), torch.zeros_like(sign)
    d_of_symbol = (order[:, None] >> (3 * torch.arange(8, device=code.device))) & 7
    symbol = (d_of_symbol == distance[:, None]).long().argmax(1)
    shape = ((order & SKEWED) != 0).long()
    kind = _table(SYMBOL_CLASS, code)[shape, symbol]
    first_symbol, extra_bits = _classes(kind, order, blocks)
    return sign | kind << 1, symbol - first_symbol, extra_bits


def _classes(kind: Tensor, order: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """First symbol and number of extra bits of each class, under each tensor's order. int64 [n] each."""
    if blocks.hybrid:
        return torch.zeros_like(kind), torch.zeros_like(kind)
    shape = ((order & SKEWED) != 0).long()
    return _table(FIRST_SYMBOL, kind)[shape, kind], _table(EXTRA_BITS, kind)[shape, kind]


def check_lengths(orders: Tensor, body: Tensor, blocks: Blocks) -> None:
    """The only two things that are known of a message before reading it."""
    if len(body) != blocks.words or len(orders) != len(blocks.layout):
        raise MessageError(
            f"expected {len(blocks.layout)} orders and a compact body of {blocks.words} words, "
            f"got {len(orders)} and {len(body)}"
        )


def _check_orders(orders: Tensor, blocks: Blocks) -> None:
    if blocks.hybrid:
        good = orders == 0
    else:
        values = torch.arange(8, device=orders.device)
        good = (((orders[:, None] >> (3 * values)) & 7).sort(dim=1).values == values).all(1) & (orders >> 25 == 0)
    if not bool(good.all()):
        raise refusal(1)


def _read_directory(words: Tensor, tables: Tables, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and end of every payload, in bits, and its elements; int64 [B] each."""
    length = fetch(words, tables.entry, tables.entry_bits)
    end = length.cumsum(0)
    if bool((end > blocks.payload_words).any()):
        raise refusal(2)
    start, stop = ((blocks.directory_words + word) * 32 for word in (end - length, end))
    count = torch.where(length > 0, fetch(words, start, tables.count_bits) + 1, 0)
    if bool((count > tables.length).any()):
        raise refusal(3)
    if bool((_by_tensor(count, tables) > tables.capacity).any()):
        raise refusal(4)
    return start, stop, count


def _find_ones(words: Tensor, unary: Tensor, stop: Tensor, count: Tensor) -> Tensor:
    """Positions of the first count [B] ones of each block's unary plane, which begins at `unary`; [n]."""
    bits = BlockRuns.of(torch.where(count > 0, stop - unary, 0))
    position = unary[bits.block] + bits.ordinal()
    one = (words[position >> 5] >> (position & 31)) & 1
    if bool((bits.totals(one) < count).any()):
        raise refusal(6)
    return position[(one == 1) & (bits.sums(one) <= count[bits.block])]


def _check_end(words: Tensor, end: Tensor, stop: Tensor, count: Tensor, blocks: Blocks) -> None:
    """Every payload ends in its last word; there is nothing behind it, behind the directory and behind the last one."""
    behind = words[int(stop[-1]) >> 5 :] if blocks.count else words
    filled = count > 0
    end, stop = end[filled], stop[filled]
    if bool((end > stop).any()) or bool((end <= stop - 32).any()):
        raise refusal(8)
    used = end - (stop - 32)  # 1 .. 32 bits of the last word
    entries = blocks.entries[-1]
    directory_rest = words[entries >> 5] >> (entries & 31) if entries % 32 else words[:0]
    if any(bool(rest.any()) for rest in (words[(stop >> 5) - 1] >> used, behind, directory_rest)):
        raise refusal(9)

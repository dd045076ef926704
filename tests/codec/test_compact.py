"""The compact format comes back as it went in, never needs more than its room, and believes nothing that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codec import compact
from gradwire.codec.form import Blocks, block_length, low_bits, room_words
from gradwire.errors import MessageError
from gradwire.layout import Layout

on_cpu = pytest.importorskip("on_cpu", reason="Numba is not installed", exc_type=ImportError)
BOTH = (compact, on_cpu)
NUMELS = (0, 1, 2, 31, 33, 256, 257, 1000, 5000, 65537)
PATTERNS = ("empty", "full", "one", "last", "random", "sparse", "cluster", "comb")


@dataclass(frozen=True)
class Drawn:
    """The elements of one message and the geometry they are sent in."""

    index: Tensor
    code: Tensor
    blocks: Blocks


def places(pattern: str, numel: int, random: np.random.Generator) -> np.ndarray:
    """Ascending places of one tensor."""
    if pattern == "empty" or not numel:
        return np.arange(0)
    if pattern == "cluster":
        begin, end = sorted(random.integers(0, numel + 1, 2))
        return np.arange(begin, min(end, begin + 3000))
    if pattern in ("random", "sparse"):
        share = random.random() * (0.01 if pattern == "sparse" else 1)
        return np.flatnonzero(random.random(numel) < share)
    steps = {"full": 1, "comb": int(random.integers(1, 70)), "one": numel}
    return np.array([numel - 1]) if pattern == "last" else np.arange(0, numel, steps[pattern])


def codes(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    shares = {
        "uniform": np.full(8, 1 / 8),
        "falling": 0.5 ** np.arange(8) / (0.5 ** np.arange(8)).sum(),
        "bell": np.array([1, 4, 9, 12, 9, 5, 3, 2]) / 45,
        "one": np.eye(8)[5],
        "none": np.eye(8)[0],
    }[kind]
    return random.choice(8, count, p=shares) + 8 * random.integers(0, 2, count)


@st.composite
def messages(draw) -> Drawn:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    numels = draw(st.lists(st.sampled_from(NUMELS), min_size=1, max_size=4))
    hybrid, spare = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 50]))
    parts = [places(draw(st.sampled_from(PATTERNS)), numel, random) for numel in numels]
    kinds = [draw(st.sampled_from(["uniform", "falling", "bell", "one"])) if not hybrid else "none" for _ in numels]
    offsets = np.cumsum([0, *numels])
    index = np.concatenate([offset + part for offset, part in zip(offsets, parts, strict=False)])
    code = np.concatenate([codes(kind, len(part), random) for kind, part in zip(kinds, parts, strict=True)])
    capacity = [min(len(part) + spare, numel) for part, numel in zip(parts, numels, strict=True)]
    layout = Layout.of((f"tensor{k}", (numel,)) for k, numel in enumerate(numels))
    blocks = Blocks.of(layout, capacity, hybrid)
    return Drawn(torch.from_numpy(index.astype(np.int64)), torch.from_numpy(code.astype(np.int32)), blocks)


def used_words(body: Tensor, blocks: Blocks) -> int:
    return int(compact.ends_of(body, blocks)[-1]) if blocks.count else 0


@given(messages())
@settings(max_examples=120, deadline=None)
def test_what_is_packed_comes_back_and_both_write_the_same_bytes(drawn):
    orders, body = compact.pack(drawn.index, drawn.code, drawn.blocks)
    fast_orders, fast_body = on_cpu.pack(drawn.index, drawn.code, drawn.blocks)
    assert body.dtype == orders.dtype == torch.int32
    assert len(body) == drawn.blocks.words
    assert torch.equal(orders, fast_orders)
    assert torch.equal(body, fast_body)
    in_lists = on_cpu.pack(drawn.index, drawn.code, drawn.blocks, chunk=300)  # of which a block has several
    assert torch.equal(in_lists[0], orders)
    assert torch.equal(in_lists[1], body)
    index, code = on_cpu.unpack(orders, body, drawn.blocks, chunk=300)
    assert torch.equal(index, drawn.index)
    assert torch.equal(code, drawn.code)
    for module in BOTH:
        index, code = module.unpack(orders, body, drawn.blocks)
        assert (index.dtype, code.dtype) == (torch.int64, torch.int32)
        assert torch.equal(index, drawn.index)
        assert torch.equal(code, drawn.code)


def test_many_threads_write_the_same_bytes(monkeypatch):
    random = np.random.default_rng(0)
    index = torch.from_numpy(np.flatnonzero(random.random(3_000_000) < 0.05))
    code = torch.from_numpy(random.integers(0, 16, len(index)).astype(np.int32))
    blocks = Blocks.of(Layout.of([("a", (1_000_000,)), ("b", (2_000_000,))]), (60_000, 110_000))
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        packed = on_cpu.pack(index, code, blocks)
        results.append((*packed, *on_cpu.unpack(*packed, blocks)))
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))
    assert torch.equal(results[0][1], compact.pack(index, code, blocks)[1])


@given(st.integers(1, 1 << 40), st.data())
@settings(max_examples=200, deadline=None)
def test_the_length_of_a_block_is_the_smallest_that_holds_256(numel, data):
    capacity = data.draw(st.integers(1, numel))
    length = block_length(numel, capacity)
    assert length & (length - 1) == 0
    assert 1 << 8 <= length <= 1 << 24
    assert length * capacity >= 256 * numel or length == 1 << 24
    assert length // 2 * capacity < 256 * numel or length == 1 << 8


def test_the_low_bits_are_those_of_the_cheapest_line():
    """k = floor(log2((L - c) / c)) makes c (k + 1) + (L - c) / 2^k smallest: the proof of the room needs that."""
    for length in (1, 2, 3, 31, 256, 257, 4096):
        for count in range(1, length + 1):
            lines = [count * (k + 1) + (length - count) / 2**k for k in range(25)]
            assert lines[low_bits(length, count)] == min(lines), (length, count)


def test_blocks_cover_every_tensor_with_capacity():
    layout = Layout.of([("a", (5000,)), ("b", (7,)), ("c", (300,)), ("d", (0,))])
    blocks = Blocks.of(layout, (600, 0, 300, 0))
    tables = blocks.tables(torch.device("cpu"))
    assert blocks.lengths[0] == 4096
    assert tables.begin.tolist() == [0, 4096, 5007, 5263]
    assert tables.length.tolist() == [4096, 904, 256, 44]
    assert tables.tensor.tolist() == [0, 0, 2, 2]
    assert blocks.first == (0, 2, 2, 4, 4)
    assert blocks is Blocks.of(layout, [600, 0, 300, 0])
    with pytest.raises(ValueError, match="capacity"):
        Blocks.of(layout, (600, 8, 300, 0))


def worst(blocks: Blocks, split: np.ndarray, reverse: bool) -> tuple[Tensor, Tensor]:
    """split [B] elements in the blocks, all slack of a block in one gap: nothing is lost in the low bits' rounding.

    Codes are spread over all d, so that no shape is cheaper than four bits.
    """
    tables, parts = blocks.tables(torch.device("cpu")), []
    for begin, length, count in zip(tables.begin.tolist(), tables.length.tolist(), split.tolist(), strict=True):
        at = np.arange(count)
        if count and not reverse:
            at[-1] = length - 1
        elif reverse:
            at += length - count
        parts.append(begin + at)
    index = torch.from_numpy(np.concatenate(parts))
    return index, (torch.arange(len(index)) % 8).int() * (not blocks.hybrid)


@given(
    st.integers(1, 20_000),
    st.floats(0.0005, 1),
    st.sampled_from(["even", "front", "back", "random", "lumps"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_no_split_over_the_blocks_needs_more_than_the_room(numel, density, how, reverse, hybrid, seed):
    random = np.random.default_rng(seed)
    capacity = max(1, int(numel * density))
    blocks = Blocks.of(Layout.of([("a", (numel,))]), (capacity,), hybrid)
    lengths = blocks.tables(torch.device("cpu")).length.numpy()
    wish = {
        "even": capacity * lengths / numel,
        "front": np.maximum(0, np.minimum(lengths, capacity - lengths.cumsum() + lengths)),
        "back": np.maximum(0, np.minimum(lengths, capacity - lengths[::-1].cumsum() + lengths[::-1]))[::-1],
        "random": random.multinomial(capacity, lengths / numel),
        "lumps": lengths * (random.random(len(lengths)) < density),
    }[how]
    split = np.minimum(np.floor(wish), lengths).astype(np.int64)
    while split.sum() > capacity:
        split[split.argmax()] -= min(split.max(), split.sum() - capacity)
    index, code = worst(blocks, split, reverse)
    for module in BOTH:
        orders, body = module.pack(index, code, blocks)
        assert used_words(body, blocks) <= blocks.payload_words
        assert torch.equal(module.unpack(orders, body, blocks)[0], index)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 7, 40, 300, 3000])
def test_the_room_is_tight(ratio, hybrid):
    """There are elements that need it but for two words a block: padding is counted as 31 bits and may be none, and an
    even split of the capacity leaves out less than one element a block, which is less than a word."""
    numel = 3_000_000
    capacity = numel // ratio
    blocks = Blocks.of(Layout.of([("a", (numel,))]), (capacity,), hybrid)
    lengths = blocks.tables(torch.device("cpu")).length.numpy()
    index, code = worst(blocks, capacity * lengths // numel, reverse=False)
    used = used_words(on_cpu.pack(index, code, blocks)[1], blocks)
    assert blocks.payload_words == room_words(numel, capacity, hybrid)
    assert blocks.payload_words - 2 * blocks.count <= used <= blocks.payload_words


def sendable(index: Tensor, code: Tensor, blocks: Blocks) -> bool:
    """Whether they could be given to `pack`: in order, inside, within the capacity; with tau codes are signs only."""
    ascending = bool((index[1:] > index[:-1]).all()) and bool(((index >= 0) & (index < blocks.layout.numel)).all())
    counts = torch.bincount(blocks.layout.slot_of(index), minlength=len(blocks.layout))
    codes = bool(((code >= 0) & (code <= 15)).all()) and not (blocks.hybrid and bool((code & 7).any()))
    return ascending and bool((counts <= torch.tensor(blocks.capacity)).all()) and codes


def opened(module, orders: Tensor, body: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
    try:
        return module.unpack(orders, body, blocks)
    except MessageError:
        return None


@given(messages(), st.integers(0, 2**32), st.sampled_from(["bits", "directory", "counts", "orders", "noise", "moved"]))
@settings(max_examples=250, deadline=None)
def test_changed_bits_are_refused_or_stay_within_bounds(drawn, seed, how):
    """The checksum in the head notices accidents; here the bytes themselves must do no harm."""
    random, blocks = np.random.default_rng(seed), drawn.blocks
    orders, body = compact.pack(drawn.index, drawn.code, blocks)
    words, heads = body.numpy().view(np.uint32).copy(), orders.numpy().view(np.uint32).copy()
    part = words[: blocks.directory_words] if how == "directory" else words
    target = heads if how == "orders" or not len(words) else part
    if how == "noise":
        target[:] = random.integers(0, 1 << 32, len(target))
    elif how == "moved":
        target[:] = np.roll(target, int(random.integers(1, 4)))
    elif how == "counts" and len(words):
        end = int(compact.ends_of(body, blocks)[random.integers(0, blocks.count)])  # a payload begins there
        at = min(blocks.directory_words + end, len(words) - 1)
        target[at] = (int(target[at]) + int(random.integers(-2, 3))) % (1 << 32)
    else:
        for at, bit in zip(random.integers(0, len(target), 3), random.integers(0, 32, 3), strict=True):
            target[at] ^= np.uint32(1 << bit)
    orders, body = (torch.from_numpy(changed.view(np.int32)) for changed in (heads, words))
    found, fast = (opened(module, orders, body, blocks) for module in BOTH)
    assert (found is None) == (fast is None)
    if found is None or fast is None:
        return
    index, code = found
    assert torch.equal(index, fast[0])
    assert torch.equal(code, fast[1])
    assert sendable(index, code, blocks)
    again, same = compact.pack(index, code, blocks)
    if torch.equal(again, orders):
        assert torch.equal(same, body), "two bodies for the same elements"

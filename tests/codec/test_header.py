"""Messages that were cut, changed or made elsewhere are refused and change nothing; golden bytes."""

from __future__ import annotations

import hashlib

import make_golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import VGC
from gradwire import codec as kernels
from gradwire.codec import header, reference, words
from gradwire.errors import MessageError
from gradwire.layout import Layout
from gradwire.methods import Context

LAYOUT = Layout.of([("weight", (5, 7)), ("bias", (5,))])
VGC_1 = VGC(alpha=1.0, wire="words")
CONTEXT = Context(LAYOUT, step=3, capacity=(21, 3))


def message() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(40, generator=generator)
    return VGC_1.encode(grad, grad.square() * 0.9, VGC_1.init(LAYOUT, torch.device("cpu")), CONTEXT).data


def refused(messages: torch.Tensor, context: Context = CONTEXT) -> str:
    out = torch.full((40,), 7.0)
    with pytest.raises(MessageError) as caught:
        VGC_1.decode(messages, out, context)
    assert out.eq(7.0).all()  # nothing was written
    return str(caught.value)


@given(word=st.integers(0, 60), bit=st.integers(0, 31))
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_is_noticed(word, bit):
    good = message()
    bad = good.clone()
    bad[word % len(bad)] ^= 1 << bit if bit < 31 else -(1 << 31)
    refused(torch.stack([good, bad]))


@pytest.mark.parametrize("content", ["noise", "zeros", "one number"])
@pytest.mark.parametrize("places", ["anywhere", "evenly apart"])
@pytest.mark.parametrize("above", [0, 1])
@pytest.mark.parametrize("n_flips", [2, 3, 4])
def test_related_flips_are_noticed(content, places, above, n_flips):
    """The same bit of several words, and of the last one the bit above: sums of words times odd numbers miss those.

    Of 20,000 draws 64 bits without any pattern would miss one in 10^15 such tests.
    """
    n_messages, n_words = 20_000, 100
    generator = torch.Generator().manual_seed(n_flips)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    good = {"noise": drawn(-(1 << 31), 1 << 31, n_messages, n_words), "one number": drawn(0, 9, n_messages, 1)}
    good["zeros"] = torch.zeros(1, 1, dtype=torch.int64)
    bad = good[content].int().expand(n_messages, n_words).clone()
    before = reference.checksum(bad)
    if places == "anywhere":
        at = torch.rand(n_messages, n_words - 10, generator=generator).topk(n_flips).indices + 10
    else:
        at = drawn(10, 40, n_messages, 1) + drawn(1, 15, n_messages, 1) * torch.arange(n_flips).roll(n_flips // 2)
    bits = drawn(0, 32 - above, n_messages, 1).repeat(1, n_flips)
    bits[:, -1] += above
    bad.scatter_(1, at, bad.gather(1, at) ^ (1 << bits).int())
    assert (reference.checksum(bad) != before).any(1).all()


def test_a_cut_message_is_refused():
    assert "words" in refused(message()[None, :-1])


def test_another_version_model_or_step_is_named():
    good = message()
    bad = good.clone()
    bad[1] += 1
    assert "version 3" in refused(bad[None])
    other = Layout.of([("other", (5, 7)), ("bias", (5,))])
    assert "another model" in refused(good[None], Context(other, 3, (21, 3)))
    assert "out of step" in refused(good[None], Context(LAYOUT, 4, (21, 3)))
    assert "no gradwire message" in refused(torch.zeros_like(good)[None])


def resealed(bad: torch.Tensor) -> torch.Tensor:
    """With a right checksum: a hostile rank can make one, so bounds must hold without it."""
    bad[header.CHECKSUM] = 0
    bad[header.CHECKSUM] = reference.checksum(bad)
    return bad[None]


def test_bounds_hold_even_under_a_right_checksum():
    shape = header.Shape(LAYOUT, 24, kernels.CHUNK, 1)
    start = shape.body.start
    for place, value, text in [
        (start, 40, "not in this bucket"),
        (start, (1 << 28) - 1, "not in this bucket"),
        (start + 1, int(message()[start]), "out of order"),
        (shape.counts.start, 25, "capacity"),
        (shape.counts.start, -1, "capacity"),
        (shape.passed.start, -2, "negative"),
        (shape.exponents.start, -127 & 0xFF, "exponents"),
    ]:
        bad = message()
        bad[place] = value
        assert text in refused(resealed(bad)), (place, value)


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 15)), unique_by=lambda pair: pair[0]), st.integers(1, 300)
)
@settings(max_examples=100, deadline=None)
def test_words_come_back_across_chunks(pairs, chunk):
    pairs.sort()
    index = torch.tensor([place for place, _ in pairs], dtype=torch.int64)
    code = torch.tensor([code for _, code in pairs], dtype=torch.int32)
    counts = torch.bincount(index // chunk, minlength=-(-1000 // chunk))
    packed = words.pack(index, code, chunk)
    assert packed.dtype == torch.int32
    places, codes = words.unpack(packed, counts, chunk)
    assert torch.equal(places, index)
    assert torch.equal(codes, code)


def test_a_bucket_of_several_chunks(monkeypatch):
    """More than 2^28 elements are cut into chunks; here the chunk is made small instead of the tensor large."""
    whole = VGC_1.decode(message()[None], expected := torch.empty(40), CONTEXT)
    monkeypatch.setattr(kernels, "CHUNK", 16)
    out = torch.empty(40)
    arrival = VGC_1.decode(message()[None], out, CONTEXT)
    assert torch.equal(out, expected)
    assert torch.equal(arrival.passed, whole.passed)
    assert header.Shape(LAYOUT, 24, kernels.CHUNK, 1).chunks == 3


@pytest.mark.parametrize("format", make_golden.METHODS)
def test_golden_messages(format):
    """Whole messages: a changed byte is a new version. Version 1 had another checksum, and is refused by name."""
    stored = {version: make_golden.stored(f"{format}.version{version}.bin") for version in (1, header.VERSION)}
    assert torch.equal(make_golden.message(format), stored[header.VERSION])
    changed = (stored[1] != stored[header.VERSION]).nonzero().flatten().tolist()
    assert changed == [1, 8, 9]
    out = torch.full((LAYOUT.numel,), 7.0)
    with pytest.raises(MessageError) as caught:
        make_golden.METHODS[format].decode(stored[1][None], out, make_golden.CONTEXT)
    number = {"words": 1, "compact": 2, "fixed": 3}[format]
    assert f"has format {number} version 1, expected format {number} version 2" in str(caught.value)
    assert "install the same gradwire on every rank" in str(caught.value)
    assert out.eq(7.0).all()


def test_golden_bytes_of_version_2():
    """A changed byte is a new version: readers of the old one must be able to refuse it."""
    layout = Layout.of([("a", (3,)), ("b", (2,))])
    vgc = VGC(alpha=1.0, wire="words")
    grad = torch.tensor([0.75, -3.0, 0.1, 1.0, -0.002])
    data = vgc.encode(grad, torch.zeros(5), vgc.init(layout, torch.device("cpu")), Context(layout, 9, (3, 3))).data
    assert data.numpy().tobytes().hex() == (
        "47525752"
        "02000100" + hashlib.sha256(b"a (3,)\nb (2,)").hexdigest()[:16] + "09000000"
        "01000000"
        "02000000"
        "01000000" + by_the_page(data) + "04000000"
        "03000000"
        "01000000"
        "01000000"
        "00000010"
        "010000800"
        "2000040"
        "03000000"
        "0000000000000000"
    )


def by_the_page(message: torch.Tensor) -> str:
    """The checksum as docs/wire-format.md has it, in Python's whole numbers."""
    words, total = [word & 0xFFFFFFFF for word in [*message.tolist(), 0]], 0
    for i in set(range(-(-len(message) // 2))) - {4}:
        x = words[2 * i] + (words[2 * i + 1] << 32) + i * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        for _ in range(2):
            x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
        total += x ^ x >> 32
    return (total & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little").hex()

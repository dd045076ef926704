"""Messages that were cut, changed or made elsewhere are refused and change nothing; golden bytes of version 1."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import VGC, kernels
from gradwire.compressors import Context
from gradwire.errors import MessageError
from gradwire.kernels import reference
from gradwire.layout import Layout
from gradwire.wire import header, words

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


def test_a_cut_message_is_refused():
    assert "words" in refused(message()[None, :-1])


def test_another_version_model_or_step_is_named():
    good = message()
    bad = good.clone()
    bad[1] += 1
    assert "version 2" in refused(bad[None])
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


def test_golden_bytes_of_version_1():
    """A changed byte is a new version: readers of the old one must be able to refuse it."""
    layout = Layout.of([("a", (3,)), ("b", (2,))])
    vgc = VGC(alpha=1.0, wire="words")
    grad = torch.tensor([0.75, -3.0, 0.1, 1.0, -0.002])
    data = vgc.encode(grad, torch.zeros(5), vgc.init(layout, torch.device("cpu")), Context(layout, 9, (3, 3))).data
    assert data.numpy().tobytes().hex() == (
        "47525752"
        "01000100" + hashlib.sha256(b"a (3,)\nb (2,)").hexdigest()[:16] + "09000000"
        "01000000"
        "02000000"
        "01000000" + data[8:10].numpy().tobytes().hex() + "04000000"
        "03000000"
        "01000000"
        "01000000"
        "00000010"
        "010000800"
        "2000040"
        "03000000"
        "0000000000000000"
    )

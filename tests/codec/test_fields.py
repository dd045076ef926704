"""Small fields in words: the bytes, and the compiled code against plain torch."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec import fields

SIZES = [0, 1, 31, 32, 33, 100, 65537]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("size", SIZES)
def test_round_trip_and_the_bits_of_the_reference(bits, size, dtype):
    numbers = torch.randint(0, 1 << bits, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    words = fields.pack(numbers, bits)
    assert words.dtype == torch.int32
    assert len(words) == fields.n_words(size, bits)
    assert torch.equal(words, fields.reference_pack(numbers, bits))
    back = fields.unpack(words, bits, size)
    assert back.dtype == torch.int32
    assert torch.equal(back, numbers.int())
    assert torch.equal(back, fields.reference_unpack(words, bits, size))


def test_threads_share_the_words(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for bits in (1, 3, 4):
        numbers = torch.randint(0, 1 << bits, (1_000_003,), generator=torch.Generator().manual_seed(bits))
        words = fields.pack(numbers, bits)
        assert torch.equal(words, fields.reference_pack(numbers, bits))
        assert torch.equal(fields.unpack(words, bits, len(numbers)), numbers.int())


@pytest.mark.parametrize("pack", [fields.pack, fields.reference_pack])
@pytest.mark.parametrize(
    ("bits", "numbers", "golden"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 0, 1] + [0] * 22 + [1, 1], "0d010080" + "01000000"),
        (2, [1, 2, 3, 0, 3], "39030000"),
        (3, [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 7], "d1581f11" + "07000000"),
        (4, [1, 2, 3, 4, 5, 6, 7, 15, 9], "214365f7" + "09000000"),
        (8, [1, 255, 0, 128, 2], "01ff0080" + "02000000"),
    ],
)
def test_golden_bytes(pack, bits, numbers, golden):
    assert pack(torch.tensor(numbers), bits).numpy().tobytes().hex() == golden


def test_booleans():
    assert fields.pack(torch.tensor([True, False, True]), 1).tolist() == [5]


def test_a_row_of_a_matrix():
    """As a rank's body comes."""
    words = torch.arange(-6, 6, dtype=torch.int32).view(3, 4)[:, 1:]
    assert torch.equal(fields.unpack(words[1], 4, 20), fields.reference_unpack(words[1], 4, 20))

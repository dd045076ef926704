"""The code of Elias and Fano against its definition bit by bit, and bits that nobody wrote."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gradwire.codec.quota import Quota, table_of
from gradwire.layout import Layout
from gradwire.methods.topk.places import PlaceCode, pack, unpack

CPU = torch.device("cpu")


def quota_of(*pairs: tuple[int, int]) -> Quota:
    """(n, k) of each tensor."""
    layout = Layout.of((f"tensor{i}", (n,)) for i, (n, _) in enumerate(pairs))
    return Quota(layout, tuple(k for _, k in pairs))


def drawn(quota: Quota, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    pairs = zip(quota.layout, quota.counts, strict=True)
    return [sorted(generator.sample(range(slot.numel), count)) for slot, count in pairs]


def oracle(quota: Quota, places: list[list[int]]) -> list[int]:
    """The words, from strings of bits."""
    lows, planes = "", ""
    for slot, its in zip(quota.layout, places, strict=True):
        if not its:
            continue
        low = 0
        while len(its) << (low + 1) <= slot.numel:
            low += 1
        lows += "".join(str(place >> bit & 1) for place in its for bit in range(low))
        plane = ["0"] * (len(its) + ((slot.numel - 1) >> low))
        for i, place in enumerate(its):
            plane[(place >> low) + i] = "1"
        planes += "".join(plane)
    words = []
    for text in (lows, planes):
        text += "0" * (-len(text) % 32)
        words += [int(text[i : i + 32][::-1], 2) for i in range(0, len(text), 32)]
    return [word - (word >> 31 << 32) for word in words]


def flat(quota: Quota, places: list[list[int]]) -> Tensor:
    """Places in the bucket."""
    pairs = zip(quota.layout, places, strict=True)
    return torch.tensor([slot.offset + place for slot, its in pairs for place in its])


SHAPES = [
    [(1, 1)],
    [(31, 31), (33, 1)],
    [(0, 0), (100, 7), (0, 0), (64, 32)],
    [(65537, 656), (10, 1), (1 << 20, 3)],
    [(1 << 30, 2), (5, 4)],
]


@pytest.mark.parametrize("pairs", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_bits_are_as_defined_and_come_back(pairs: list[tuple[int, int]], seed: int) -> None:
    quota = quota_of(*pairs)
    code, places = PlaceCode(quota), drawn(quota, seed)
    words = pack(flat(quota, places), code)
    assert words.tolist() == oracle(quota, places)
    back, wrong = unpack(words, code, code.entries(CPU))
    assert back.tolist() == flat(quota, places).tolist()
    assert not wrong


def test_a_place_may_come_twice() -> None:
    quota = quota_of((100, 5), (10, 2))
    code, places = PlaceCode(quota), flat(quota, [[3, 50, 99, 99, 99], [9, 9]])
    back, wrong = unpack(pack(places, code), code, code.entries(CPU))
    assert back.tolist() == places.tolist()
    assert not wrong


def test_any_bits_give_places_within_their_tensors() -> None:
    quota = quota_of((100, 5), (10, 2), (1000, 9))
    code, owner = PlaceCode(quota), quota.tensor(CPU)
    begins, numels = table_of(quota, CPU).offsets[owner], table_of(quota, CPU).numels[owner]
    generator, refused = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (code.words,), generator=generator).int()
        places, wrong = unpack(words, code, code.entries(CPU))
        assert bool(((places >= begins) & (places < begins + numels)).all())
        refused += bool(wrong)
    assert refused > 150  # most bits are no places at all


def test_one_in_a_hundred_takes_less_than_nine_bits() -> None:
    assert PlaceCode(quota_of((1_000_000, 10_000))).words * 32 / 10_000 < 8.6

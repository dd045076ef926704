"""Cases of test_triton.py: the head of a message and the compact format, bit for bit as the reference has them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from drawn import RULES, SIZES, kernels, layout_of, messages
from torch import Tensor

from gradwire.codec import CHUNK, compact, header, reference
from gradwire.codec.form import Blocks


def check_head(device: str) -> None:
    """The same bytes in both formats, and the same problems in damaged ones."""
    generator = torch.Generator().manual_seed(1)
    for sizes, chunk, kind in (
        (SIZES, 700, header.WORDS),
        ([3] * 700, CHUNK, header.COMPACT),
        ([5], CHUNK, header.WORDS),
    ):
        shape = header.Shape(layout_of(sizes), 40, chunk, kind)
        n_slots = len(sizes)

        def numbers(count: int, low: int, high: int) -> Tensor:
            return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32).to(device)

        counts = numbers(shape.chunks, 0, 40 // shape.chunks) * (kind == header.WORDS)
        orders = numbers(n_slots, 0, 1 << 25) if kind == header.COMPACT else None
        parts = (counts, numbers(n_slots, -1, 9), numbers(n_slots, -128, 128), orders, numbers(40, -9, 9))
        for finite in (True, False):
            flag = torch.tensor(finite, device=device)
            whole = header.Parts(flag, *parts)
            wanted, got = (kernel.seal(shape, 2**31 + 3, whole) for kernel in (reference, kernels()))
            assert torch.equal(wanted, got)
        row = torch.cat([got, got[:5]])  # as the courier's room may be: wider than a message
        damaged = torch.tensor([*range(12), len(got) // 2, len(got) - 1])
        rows = row.repeat(len(damaged) + 2, 1)
        rows[torch.arange(len(damaged)), damaged] ^= 1 << 30
        rows[-2, shape.counts], rows[-1, shape.passed] = -1, -2
        rows[-2:, header.CHECKSUM] = 0
        rows[-2:, header.CHECKSUM] = reference.checksum(rows[-2:, : shape.words])
        wanted, got = (kernel.inspect(rows[:, : shape.words], shape, 3) for kernel in (reference, kernels()))
        assert torch.equal(wanted, got)
        assert got.any(1).all()
        assert got.sum(0).gt(0).tolist() == [True] * 7


def check_compact(device: str, name: str) -> None:
    """Same bytes; back to the same words; bodies that are broken anywhere are refused by both, or read alike."""
    for share, chunk in ((0.05, CHUNK), (0.4, 700)):
        layout, capacity, found = messages(device, RULES[name], SIZES, share, 2, chunk)
        blocks = Blocks.of(layout, capacity, name == "hybrid")
        packed = []
        for one in found:
            inputs = (one.words, one.counts, one.codes, blocks, chunk)
            wanted, got = reference.pack(*inputs), kernels().pack(*inputs)
            assert all(map(torch.equal, wanted, got))
            packed.append(got)
        orders, bodies = (torch.stack(parts) for parts in zip(*packed, strict=True))
        assert not unpacked_alike(orders, bodies, blocks, chunk)
        generator = torch.Generator().manual_seed(3)
        n_refused = 0
        for trial in range(6):
            broken = bodies.clone()
            noise = torch.randint(-(1 << 31), (1 << 31) - 1, bodies[0].shape, generator=generator).int().to(device)
            if trial == 0:
                broken[0] = noise
            elif trial == 1:
                broken[0, blocks.directory_words :] = noise[blocks.directory_words :]
            else:
                broken[0, int(noise[0]) % len(noise)] ^= 1 << (int(noise[1]) % 31)
            n_refused += unpacked_alike(orders, broken, blocks, chunk)
        assert n_refused >= 3
        assert unpacked_alike(orders ^ 1, bodies, blocks, chunk)


def check_crowded(device: str) -> None:
    """Blocks of several windows of the unary plane; and more elements than a tensor may have."""
    layout = layout_of([20000, 5])
    generator = torch.Generator().manual_seed(1)
    places = (
        torch.arange(2000),
        torch.arange(0, 4000, 2) + 5,
        torch.randperm(4096, generator=generator)[:1999].sort().values,
        torch.randperm(20000, generator=generator)[:1500].sort().values,
    )
    blocks = Blocks.of(layout, (2000, 5))
    # the interpreter takes its time: every place once, in turn in one chunk and in many
    turns = zip(places, itertools.cycle((CHUNK, 700)), strict=False)
    for place, chunk in itertools.product(places, (CHUNK, 700)) if device == "cuda" else turns:
        orders, bodies = packed_places(place, blocks, generator, device)
        assert not unpacked_alike(orders, bodies, blocks, chunk)
    blocks = Blocks.of(layout, (6000, 5))
    orders, bodies = packed_places(torch.arange(5500) * 3, blocks, generator, device)
    assert not unpacked_alike(orders, bodies, replace(blocks, capacity=(5500, 5)), CHUNK)
    assert unpacked_alike(orders, bodies, replace(blocks, capacity=(5499, 5)), CHUNK)


def packed_places(place: Tensor, blocks: Blocks, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """A message with any codes, [1, K] orders and [1, words] of the body."""
    code = torch.randint(0, 16, place.shape, generator=generator).int()
    return tuple(part[None].to(device) for part in compact.pack(place, code, blocks))


def unpacked_alike(orders: Tensor, bodies: Tensor, blocks: Blocks, chunk: int) -> bool:
    """Whether both refuse rank 0; what they read is the same."""
    sound = torch.ones(len(bodies), dtype=torch.bool, device=bodies.device)
    wanted, got = (kernel.unpack(orders, bodies, sound, blocks, chunk) for kernel in (reference, kernels()))
    assert torch.equal(wanted[1], got[1])
    assert torch.equal(wanted[2], got[2])
    for rank, count in enumerate(wanted[1].sum(1).tolist()):
        assert torch.equal(wanted[0][rank, :count], got[0][rank, :count])
    return bool(got[2][0])

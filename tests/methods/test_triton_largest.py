"""The Triton kernels of the largest elements against plain torch, bit for bit: in Triton's interpreter and on a GPU.

The interpreter is chosen when Triton is imported, so the cases run in another process: this file, as a script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import interpreted
from gradwire.arithmetic.draws import key_of
from gradwire.arithmetic.shuffle import progression
from gradwire.codec.quota import Quota
from gradwire.layout import Layout
from gradwire.methods.topk.definition import select_largest
from gradwire.methods.topk.largest import EXPECTED, largest

SIZES = [33, 1, 0, 2050, 31, 129, 3001]  # with a density of 0.1 two are sampled


def layout_of(sizes: Sequence[int]) -> Layout:
    return Layout.of((f"tensor{i}", (size,)) for i, size in enumerate(sizes))


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def smallest() -> Tensor:
    """The smallest denormal, [1]."""
    return torch.tensor([1], dtype=torch.int32).view(torch.float32)


def check(
    flat: Tensor, layout: Layout, density: float, device: str, step: int = 0, active: list[bool] | None = None
) -> dict[bool, Tensor]:
    """The values that both give, if exact and if not."""
    from gradwire.methods.topk import gpu

    quota, flat, found = Quota.of(layout, density), flat.to(device), {}
    live = None if active is None else torch.tensor(active, device=device)
    for exact in (False, True):
        wanted, before = largest(flat, quota, step, exact, live), flat.clone()
        places, values = gpu.largest(flat, quota, step, exact, live)
        assert places.dtype == torch.int64
        assert values.dtype == torch.float32
        assert torch.equal(places, wanted[0]), exact
        assert torch.equal(values.view(torch.int32), wanted[1].view(torch.int32)), exact
        assert torch.equal(flat.view(torch.int32), before.view(torch.int32))
        found[exact] = values
    return found


def check_density(device: str, density: float) -> None:
    layout = layout_of(SIZES)
    values = check(normal(layout.numel), layout, density, device)[True]
    assert values.count_nonzero() == Quota.of(layout, density).total


def check_inactive(device: str) -> None:
    layout = layout_of(SIZES)
    active = [number not in (1, 3, 6) for number in range(len(SIZES))]
    for density in (0.1, 0.5):
        values = check(normal(layout.numel), layout, density, device, active=active)
        quota = Quota.of(layout, density)
        idle = sum(count for count, live in zip(quota.counts, active, strict=True) if not live)
        assert values[True].eq(0).sum() == idle > 500
    assert not check(normal(layout.numel), layout, 0.1, device, active=[False] * len(SIZES))[False].any()


def check_ties(device: str) -> None:
    """Many, nearly all, and all alike: then it is the first places of every tensor."""
    layout = layout_of(SIZES)
    for density in (0.1,) if device == "cpu" else (0.1, 0.4):  # the interpreter takes seconds for each
        check((normal(layout.numel) * 2).round() / 2, layout, density, device)
        sparse = torch.where(normal(layout.numel, 1) > 2, -1.0, 0.5)
        check(sparse, layout, density, device)
        equal = torch.where(normal(layout.numel, 2) > 0, 0.75, -0.75)
        values = check(equal, layout, density, device)[True]
        quota = Quota.of(layout, density)
        firsts = [slot.of(equal)[:count] for slot, count in zip(layout, quota.counts, strict=True)]
        assert torch.equal(values.cpu(), torch.cat(firsts))


def check_zeros(device: str) -> None:
    """Of both signs, everywhere or nearly; a tensor of the smallest denormals, and some among zeros."""
    layout = layout_of([33, 1, 0, 1500])
    for density in (0.1,) if device == "cpu" else (0.1, 0.6):
        assert not check(torch.zeros(layout.numel), layout, density, device)[True].any()
        signs = torch.where(normal(layout.numel) > 0, 0.0, -0.0)
        assert not check(signs, layout, density, device)[True].any()
        some = torch.where(normal(layout.numel, 1) > 2.3, normal(layout.numel), signs)
        check(some, layout, density, device)
        check(torch.where(normal(layout.numel, 2) > 1, -smallest(), signs), layout, density, device)
        check(smallest().expand(layout.numel).clone(), layout, density, device)
        check(normal(layout.numel) * 1e-39, layout, density, device)
        check(normal(layout.numel) * (normal(layout.numel, 3) * 30).exp2(), layout, density, device)


def check_bits(device: str) -> None:
    """Sizes that differ in the digits of one level only, by one in the last bit, and in all bits."""
    layout, generator = layout_of([3001, 300]), torch.Generator().manual_seed(0)
    for shift, some in ((0, 3), (0, 1 << 10), (10, 1 << 10), (20, 1 << 10), (0, 0x7F800000)):
        sizes = torch.randint(0, some, (layout.numel,), generator=generator) << shift
        sizes += 0x3F800000 if some << shift < 1 << 20 else 0
        words = sizes.clamp_(max=0x7F7FFFFF).int() | torch.randint(-1, 1, sizes.shape, generator=generator).int() << 31
        check(words.view(torch.float32), layout, 0.05, device)


def check_sample(device: str) -> None:
    """A sample of the largest alone lets too few pass, one of nothing lets all pass."""
    layout = layout_of([700, 3001, 31])
    quota, slot = Quota.of(layout, 0.2), layout.slots[1]
    factor, start = progression(key_of(0, 8, slot.name), slot.numel)
    seen = (factor * torch.arange(EXPECTED * slot.numel // quota.counts[1]) + start) % slot.numel + slot.offset
    flat = normal(layout.numel)
    for others in (flat, smallest().expand(layout.numel).clone()):
        others[seen] = torch.where(torch.arange(len(seen)) % 2 == 0, 100.0, 101.0)
        values = check(others, layout, 0.2, device, step=8)
        assert values[False].count_nonzero() < quota.total == values[True].count_nonzero()
    flat[seen] = 0.0
    check(flat, layout, 0.2, device, step=8)


def check_shapes(device: str) -> None:
    """One tensor, many, tensors without elements alone; a vector that is not aligned."""
    for size in (1, 31, 33, 4096):
        check(normal(size), layout_of([size]), 0.1, device)
    many = layout_of([1 + 37 * number % 300 for number in range(24 if device == "cpu" else 60)])
    check(normal(many.numel), many, 0.1, device)
    check(normal(0), layout_of([0, 0]), 0.1, device)
    layout = layout_of([4099, 5])
    check(normal(layout.numel + 1)[1:], layout, 0.1, device)


CASES: dict[str, Callable[[str], None]] = {
    **{
        f"density {density}": lambda device, density=density: check_density(device, density)
        for density in (0.001, 0.03, 0.1, 0.5, 0.51, 1.0)
    },
    "inactive": check_inactive,
    "ties": check_ties,
    "zeros": check_zeros,
    "bits": check_bits,
    "sample": check_sample,
    "shapes": check_shapes,
}


def serve() -> None:
    """In the interpreter."""
    import interpreter

    from gradwire.methods.topk import gpu

    interpreter.install()
    gpu.TILE, gpu.PIECE = (
        1024,
        512,
    )  # so that a small tensor has several tiles, and these several pieces
    gpu.LANES, gpu.SAMPLED = 128, 128
    interpreted.serve(CASES)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str, interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: str) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.001, 0.01, 0.6])
def test_many_elements_on_gpu(density: float) -> None:
    """Tensors of many tiles; all of one alike, one of zeros; and nothing waits for the device."""
    layout = layout_of([3_000_001, 64, 1_000_000, 4097, 2_359_296, 700_001])
    flat = normal(layout.numel)
    layout.slots[2].of(flat).fill_(0.5)
    layout.slots[5].of(flat).zero_()
    check(flat, layout, density, "cuda", step=3)
    quota, flat = Quota.of(layout, density), flat.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for exact in (False, True):
            select_largest(flat, quota, 4, exact, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    serve()

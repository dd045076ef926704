"""The Triton kernels against the reference, bit for bit: in Triton's interpreter, and on a GPU where there is one.

The interpreter is chosen when Triton is imported, so the cases run in another process: this file, as a script.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from drawn import RULES, SIZES, cut_small, draw, kernels, layout_of, messages
from torch import Tensor
from wire_cases import check_compact, check_crowded, check_head

import interpreted
from gradwire.codec import CHUNK, Inputs, Rule, Selection, reference
from gradwire.codec import words as wire_words
from gradwire.layout import Layout

RESULTS = ("words", "counts", "codes", "exponents", "passed", "finite")


def same(left: Selection, right: Selection) -> None:
    for name in RESULTS:
        one, two = getattr(left, name), getattr(right, name)
        assert one.dtype == two.dtype, name
        assert torch.equal(one, two), name


def run(
    device: str,
    rule: Rule,
    sizes: list[int],
    share: float,
    chunk: int = CHUNK,
    steps: int = 2,
    active: list[bool] | None = None,
    tile: int = 256,
    spoil: Callable[[Tensor, Tensor], None] = lambda grad, moment: None,
    lean: bool = False,
) -> Selection:
    """Several steps of both; after every step all results, r and v are equal, and after the last one's undo.

    lean: the kernels have no variance, as with alpha = 0 it counts for nothing.
    """
    cut_small(device, tile)
    layout = layout_of(sizes)
    capacity = tuple(int(share * size) for size in sizes)
    live = None if active is None else torch.tensor(active, device=device)
    left, right = ([torch.zeros(layout.numel, device=device) for _ in range(2)] for _ in range(2))
    for step in range(steps):
        grad, moment = draw(layout, step, device)
        spoil(grad, moment)
        common = (layout, rule, capacity, step, chunk)
        one = reference.select(Inputs(grad, moment, *left, live), *common)
        given = (grad, None, right[0], None, live) if lean else (grad, moment, *right, live)
        two = kernels().select(Inputs(*given), *common)
        same(one, two)
        assert all(map(torch.equal, left[: 2 - lean], right[: 2 - lean])), step
    one.undo()
    two.undo()
    assert all(map(torch.equal, left[: 2 - lean], right[: 2 - lean]))
    return two


def check_rule(device: str, name: str) -> None:
    rule = RULES[name]
    free, short, none = (run(device, rule, SIZES, share, chunk=700) for share in (1.0, 0.1, 0.0))
    assert int(free.counts.sum()) > int(short.counts.sum()) > 0 == int(none.counts.sum())


def check_lean(device: str, name: str) -> None:
    """Without a variance: room for all, for some, and candidates spilled."""
    rule = replace(RULES[name], alpha=0.0, floor=0.0 if name == "hybrid" else 2.0)
    for share in (1.0, 0.1):
        assert int(run(device, rule, SIZES, share, chunk=700, lean=True).counts.sum()) > 0
    run(device, rule, SIZES, 0.5, active=[True, False, True, True, False], lean=True)
    run(device, replace(rule, density=None if name == "hybrid" else 0.05), SIZES, 0.1, lean=True)
    with few_eights():
        run(device, rule, [3000, 777] if device == "cpu" else [3_000_000, 777], 0.1, chunk=2000, lean=True)


@contextlib.contextmanager
def few_eights() -> Iterator[None]:
    """So many that most tiles find the scratch full."""
    from gradwire.codec.gpu import encode as gpu

    before, gpu._room = gpu._room, lambda tiles, n_words: (75, 600 + n_words)
    try:
        yield
    finally:
        gpu._room = before


def check_spills(device: str, name: str) -> None:
    """More passes than the scratch has room for: here 75 eights, so that most tiles are spilled."""
    with few_eights():
        sizes = [3000, 777] if device == "cpu" else [3_000_000, 777]
        found = run(device, RULES[name], sizes, 0.1, chunk=2000)
    assert int(found.passed.sum()) > 600
    assert int(found.counts.sum()) > 100


def check_sizes(device: str) -> None:
    for size in (0, 1, 31, 33):
        run(device, RULES["basic"], [size], 0.7)
    run(device, RULES["basic"], [65537], 0.1, steps=1, tile=2048)


def check_edges(device: str) -> None:
    """Denormals, numbers that are not finite, tensors without a gradient, everything passing, nothing passing."""

    def spoil(grad: Tensor, moment: Tensor) -> None:
        grad[40:60], moment[40:60] = 1e-39, 0
        grad[70], grad[71], moment[72], moment[73] = float("inf"), float("nan"), float("inf"), float("-inf")

    bad = run(device, RULES["basic"], SIZES, 0.5, spoil=spoil)
    assert not bad.finite
    active = run(device, RULES["basic"], SIZES, 0.5, active=[True, False, True, True, False])
    assert active.passed.tolist()[1] == -1
    everything = run(device, RULES["floor"], [600], 1.0, spoil=lambda grad, moment: (grad.fill_(-3), moment.zero_()))
    assert int(everything.counts.sum()) == 600
    nothing = run(device, RULES["basic"], [600], 1.0, spoil=lambda grad, moment: moment.fill_(float("1e30")))
    assert int(nothing.counts.sum()) == 0


def check_add(device: str) -> None:
    """In rank order, whatever the order does to the rounding: 1/3 is no power of two; 11 are more than go together."""
    for name, ranks, chunk in (("basic", 1, CHUNK), ("basic", 11, 700), ("unbiased", 3, 700), ("hybrid", 2, CHUNK)):
        layout, capacity, found = messages(device, RULES[name], SIZES, 0.5, ranks, chunk)
        inside = torch.zeros(ranks, sum(capacity) + 7, dtype=torch.int32, device=device)
        words = inside[:, 5 : 5 + sum(capacity)]  # as in a message: other strides, nothing aligned
        words.copy_(torch.stack([one.words for one in found]))
        counts, exponents = (torch.stack([getattr(one, field) for one in found]) for field in ("counts", "exponents"))
        assert not added_alike(words, counts, exponents, layout, RULES[name], chunk)
        assert torch.equal(reference.checksum(inside), kernels().checksum(inside))
        assert torch.equal(reference.checksum(inside[0]), kernels().checksum(inside[0]))


def added_alike(
    words: Tensor,
    counts: Tensor,
    exponents: Tensor,
    layout: Layout,
    rule: Rule,
    chunk: int,
    unsound: Sequence[int] = (),
) -> bool:
    """Whether both refuse a message; results and problems are the same, and nothing is written if there is one."""
    sound = torch.ones(len(words), dtype=torch.bool, device=words.device)
    sound[list(unsound)] = False
    out = [torch.full((layout.numel,), 9.0, device=words.device) for _ in range(2)]
    found = [
        kernel.add(words, counts, sound, exponents, layout, rule, chunk, target)
        for kernel, target in zip((reference, kernels()), out, strict=True)
    ]
    assert torch.equal(*found)
    assert torch.equal(*out)
    refused = bool(found[1].any()) or not sound.all()
    assert out[1].eq(9.0).all() == refused
    return refused


def check_sparse(device: str) -> None:
    """Tiles, tensors and whole chunks without a word, before, between and behind those that have some."""
    for sizes, chunk in (([0, 3000, 1, 0, 999], CHUNK), ([0, 3000, 1, 0, 999], 700), ([5], CHUNK)):
        layout = layout_of(sizes)
        for places in ([], [0], [layout.numel - 1], [layout.numel // 2], [1, 2, 3, 3001, 3999], range(1500, 1600)):
            index = torch.tensor([place for place in places if place < layout.numel], dtype=torch.int64)
            n_chunks, room = -(-layout.numel // chunk), len(index) + 3
            words, counts = torch.full((2, room), -1, dtype=torch.int32), torch.zeros(2, n_chunks, dtype=torch.int32)
            words[0, : len(index)] = wire_words.pack(index, index.int() % 16, chunk)
            counts[0] = torch.bincount(index // chunk, minlength=n_chunks)
            exponents = torch.zeros(2, len(sizes), dtype=torch.int32, device=device)
            inputs = (words.to(device), counts.to(device), exponents, layout, RULES["basic"], chunk)
            assert not added_alike(*inputs)
            assert added_alike(*inputs, unsound=[1])
    assert not added_alike(words[:, :0].to(device), counts.to(device) * 0, *inputs[2:])


def check_damage(device: str) -> None:
    """Words and exponents that are wrong somewhere, and such as are wrong everywhere."""
    for chunk in (CHUNK, 700):
        layout, _, found = messages(device, RULES["basic"], SIZES, 0.5, 2, chunk)
        fields = ("words", "counts", "exponents")
        words, counts, exponents = (torch.stack([getattr(one, field) for one in found]) for field in fields)
        noise = torch.randint(-(1 << 31), (1 << 31) - 1, words.shape, generator=torch.Generator().manual_seed(1))
        damages: list[Callable[[Tensor, Tensor], object]] = [
            lambda words, exponents: None,
            lambda words, exponents: words[0, 40].fill_(0x0FFFFFFF),
            lambda words, exponents: words[1, 50].copy_(words[1, 49]),
            lambda words, exponents: words[0, :2].copy_(words[0, :2].flip(0)),
            lambda words, exponents: words[0].copy_(words[0].flip(0)),
            lambda words, exponents, noise=noise: words.copy_(noise),
            lambda words, exponents: exponents[1].fill_(-122),
            lambda words, exponents: exponents[0, 3].fill_(-128),
        ]
        refused = []
        for damage in damages:
            pair = words.clone(), exponents.clone()
            damage(*pair)
            refused.append(added_alike(pair[0], counts, pair[1], layout, RULES["basic"], chunk))
        assert refused == [False] + [True] * 7
        garbage = torch.full_like(counts, 1 << 30)  # of one that is not sound nothing is looked at
        garbage[0] = counts[0]
        assert added_alike(words, garbage, exponents, layout, RULES["basic"], chunk, unsound=[1])


CASES: dict[str, Callable[[str], None]] = {
    **{f"rule {name}": lambda device, name=name: check_rule(device, name) for name in RULES},
    **{f"spills {name}": lambda device, name=name: check_spills(device, name) for name in ("unbiased", "hybrid")},
    **{f"lean {name}": lambda device, name=name: check_lean(device, name) for name in ("basic", "floor", "hybrid")},
    "sizes": check_sizes,
    "edges": check_edges,
    "add": check_add,
    "sparse": check_sparse,
    "damage": check_damage,
    "head": check_head,
    "compact crowded": check_crowded,
    **{f"compact {name}": lambda device, name=name: check_compact(device, name) for name in ("basic", "hybrid")},
}


def serve() -> None:
    """In the interpreter."""
    import interpreter

    from gradwire.codec.gpu import blocks, decode, head, pack, unpack

    interpreter.install()
    decode.CHECKED = head.SUMMED = decode.WRITTEN = 64  # so that a small message has several parts
    decode.TILE, decode.ADDED, decode.SEARCHED = 256, 16, 4
    pack.FOUND, unpack.PART = 4, 2
    blocks.SMALL = 64
    interpreted.serve(CASES)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str, interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: str) -> None:
    CASES[case]("cuda")


if __name__ == "__main__":
    serve()

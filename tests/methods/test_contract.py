"""What every method promises, a row a method (rows.py): one process, the very bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import BF16, FP16, Dense
from gradwire.codec import reference
from gradwire.errors import MessageError
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import METHODS, Sum, from_spec, to_spec
from gradwire.methods.base import powers, tensors
from methods.rows import ROWS, Row

SHAPES: list[tuple[int, ...]] = [(16, 24), (31,), (), (3, 5, 7), (1,), (33, 2), (24,), (40, 30)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
STEPS = 5
STATEFUL = {name: row for name, row in ROWS.items() if not isinstance(row.compressor, Sum)}
HOLDING = {name: row for name, row in STATEFUL.items() if row.compressor.holds_back}
GATHERED = {name: row for name, row in STATEFUL.items() if hasattr(row.compressor, "encode")}


def rows(table: dict[str, Row]) -> Any:
    return pytest.mark.parametrize("row", table.values(), ids=table.keys())


def gradient(step: int, rank: int = 0, layout: Layout = LAYOUT) -> Tensor:
    """Both signs, sizes over some binades, the same for a tensor whatever bucket it lies in."""
    parts = []
    for slot in layout:
        generator = torch.Generator().manual_seed(hash((slot.shape, slot.numel, step, rank)) % (1 << 31))
        scale = 0.1 + torch.rand(slot.numel, generator=generator)
        parts.append(torch.randn(slot.numel, generator=generator) * scale)
    return torch.cat(parts)


def held(ranks: InProcess, rank: int = 0) -> Tensor:
    return ranks.states[rank].residual.clone()


@rows(HOLDING)
def test_what_is_not_sent_is_kept(row: Row) -> None:
    if row.conserves is None:
        assert row.why
        return
    ranks = InProcess(row.compressor, LAYOUT)
    for step in range(STEPS):
        before, given = held(ranks), gradient(step)
        done = ranks([given])
        wanted = before + given
        difference = (done.mean + held(ranks) - wanted).abs().max()
        assert float(difference) <= row.conserves * float(wanted.abs().max()), step


@rows(ROWS)
def test_zero_gradient(row: Row) -> None:
    ranks = InProcess(row.compressor, LAYOUT, 2)
    for _ in range(2):
        done = ranks([torch.zeros(LAYOUT.numel)] * 2)
        assert done.finite
        assert not done.mean.any()
    assert not any(tensor.any() for state in ranks.states if state is not None for tensor in flat_tensors(state))


def flat_tensors(state: Any) -> list[Tensor]:
    return [getattr(state, name) for name, power in powers(state).items() if power >= 0]


@rows(ROWS)
def test_error_is_neither_too_large_nor_too_small(row: Row) -> None:
    given = gradient(0)
    done = InProcess(row.compressor, LAYOUT)([given])
    error = float((done.mean - given).norm() / given.norm())
    assert row.error[0] <= error <= row.error[1], error


@rows({name: row for name, row in ROWS.items() if row.odd})
def test_negative_gradient_is_the_negative(row: Row) -> None:
    given = gradient(1)
    one, two = (InProcess(row.compressor, LAYOUT)([sign * given]).mean for sign in (1, -1))
    assert torch.equal(one, -two)


@rows(ROWS)
def test_mean_of_three_workers(row: Row) -> None:
    """Close to the mean of the gradients as far as a single worker's is; the same twice."""
    grads = [gradient(2, rank) for rank in range(3)]
    one, two = (InProcess(row.compressor, LAYOUT, 3)(grads) for _ in range(2))
    assert torch.equal(one.mean, two.mean)
    assert bool(torch.isfinite(one.mean).all())
    wanted = sum(grads) / 3
    assert float(torch.dot(one.mean, wanted)) > 0


@rows({name: row for name, row in ROWS.items() if row.unbiased})
def test_mean_of_many_draws_is_the_gradient(row: Row) -> None:
    """Each element within Bernstein's bound, and all of them together, which shows a bias that is small everywhere."""
    given, n_draws = gradient(3), 600
    ranks = InProcess(row.compressor, LAYOUT)
    drawn = torch.stack([ranks([given]).mean.double() for _ in range(n_draws)])
    tops = torch.stack([slot.of(drawn.abs().amax(0)).max() for slot in LAYOUT])
    top, wrong = LAYOUT.spread(tops), 20.7  # -ln 1e-9: how likely a right method is to fail here
    # rounding by chance between two levels, of which the larger is at most `top`, has at most the variance |g| top
    bound = (2 * given.abs() * top * wrong / n_draws).sqrt() + top * wrong / (3 * n_draws)
    assert bool(((drawn.mean(0) - given).abs() <= bound).all())
    together = ((drawn - given) * given.sign()).sum(1)
    assert abs(float(together.mean())) <= 5 * float(together.std()) / n_draws**0.5
    assert float(together.std()) > 0


@rows(ROWS)
def test_bytes_are_no_more_than_promised(row: Row) -> None:
    layout = Layout.of([("weight", (1000, 300))])
    ranks = InProcess(row.compressor, layout)
    ranks.rooms = tuple(slot.numel // 64 for slot in layout)
    assert ranks([gradient(0, layout=layout)]).n_bytes * 8 <= row.bits * layout.numel + 8 * 80


@rows(ROWS)
def test_buckets_do_not_matter(row: Row) -> None:
    """One bucket, or three: the same mean, bit for bit, step after step."""
    whole = InProcess(row.compressor, LAYOUT, 2)
    parts = [Layout.of((s.name, s.shape) for s in LAYOUT.slots[begin:end]) for begin, end in ((0, 3), (3, 4), (4, 8))]
    apart = [InProcess(row.compressor, part, 2) for part in parts]
    for step in range(3):
        grads = [gradient(step, rank) for rank in range(2)]
        together, at, pieces = whole(grads).mean, 0, []
        for one in apart:
            pieces.append(one([grad[at : at + one.layout.numel] for grad in grads]).mean)
            at += one.layout.numel
        assert torch.equal(torch.cat(pieces), together), step


@rows(HOLDING)
def test_a_bad_step_is_taken_back(row: Row) -> None:
    """Every other element keeps what it had and gets the gradient; nothing that is not finite stays."""
    ranks = InProcess(row.compressor, LAYOUT, 2)
    ranks([gradient(0, rank) for rank in range(2)])
    before = held(ranks)
    given = gradient(1)
    given[5], given[-1] = torch.nan, torch.inf
    done = ranks([given, gradient(1, 1)])
    assert not done.finite
    for undo in done.undo:
        undo()
    assert all(bool(torch.isfinite(tensor).all()) for state in ranks.states for tensor in tensors(state))
    good = torch.where(torch.isfinite(given), given, 0.0)
    torch.testing.assert_close(held(ranks), before_and(row, before, good), rtol=1e-5, atol=1e-6)


def before_and(row: Row, before: Tensor, good: Tensor) -> Tensor:
    """What a residual is when a gradient comes to it and nothing is sent."""
    momentum = getattr(row.compressor, "momentum", None)
    if momentum:
        pytest.skip("its residual has the momentum in it: its own tests say what becomes of it")
    return before + good


@rows(HOLDING)
def test_a_tensor_without_a_gradient_is_left_alone(row: Row) -> None:
    ranks = InProcess(row.compressor, LAYOUT)
    ranks([gradient(0)])
    before = held(ranks)
    active = torch.tensor([True, False, True, False, True, True, False, True])
    idle = ~LAYOUT.spread(active)
    done = ranks([torch.where(idle, 0.0, gradient(1))], active=active)
    assert not done.mean[idle].any()
    assert torch.equal(held(ranks)[idle], before[idle])
    assert not torch.equal(held(ranks)[~idle], before[~idle])


@rows(HOLDING)
def test_a_dense_step_sends_what_is_held_back(row: Row) -> None:
    ranks = InProcess(row.compressor, LAYOUT, 2)
    ranks([gradient(0, rank) for rank in range(2)])
    before = [held(ranks, rank) for rank in range(2)]
    grads = [gradient(1, rank) for rank in range(2)]
    done = ranks(grads, dense=True)
    if not getattr(row.compressor, "momentum", None):
        torch.testing.assert_close(done.mean, (sum(before) + sum(grads)) / 2, rtol=1e-5, atol=1e-6)
    assert not held(ranks).any()


@rows(GATHERED)
def test_damaged_bodies_are_refused_or_harmless(row: Row) -> None:
    """Any bits with a checksum that fits: an error, or numbers; nothing outside the result is written."""
    ranks = InProcess(row.compressor, LAYOUT)
    context = ranks.context()
    message = row.compressor.encode(gradient(0), gradient(0).square(), ranks.states[0], context)
    room = torch.full((LAYOUT.numel + 64,), 3.0)
    out = room[32:-32]
    with pytest.raises(MessageError, match="checksum"):
        row.compressor.decode(flipped(message.data)[None], out, context)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        damaged = message.data.clone()
        body = slice(10, len(damaged))
        places = torch.randint(body.start, body.stop, (3,), generator=generator)
        damaged[places] = torch.randint(-(1 << 31), (1 << 31) - 1, (3,), generator=generator).int()
        resealed(damaged)
        with contextlib.suppress(MessageError):
            row.compressor.decode(damaged[None], out, context)
        assert bool((room[:32] == 3).all())
        assert bool((room[-32:] == 3).all())


@rows(GATHERED)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_refused_message_changes_nothing(plain_torch: Callable[[], None], row: Row, compiled: bool) -> None:
    if not compiled:
        plain_torch()
    n_refused = check_refusals(row.compressor, torch.device("cpu"))
    assert n_refused > (9 if getattr(row.compressor, "vote", False) else 20)  # any body may be votes


def check_refusals(compressor: Any, device: torch.device) -> int:
    """How often the second of three messages is refused: result and states are what they were. Else: numbers."""
    ranks = InProcess(compressor, LAYOUT, 3, device=device)
    context, n_refused = ranks.context(), 0
    grads = [gradient(0, rank).to(device) for rank in range(3)]
    pairs = zip(grads, ranks.states, strict=True)
    messages = torch.stack([compressor.encode(grad, grad.square(), state, context).data for grad, state in pairs])
    states = ranks.snapshot()
    untouched = torch.arange(LAYOUT.numel, dtype=torch.float32, device=device)
    for damaged in damages(messages[1].cpu()):
        given, out, refused = messages.clone(), untouched.clone(), False
        given[1] = damaged
        try:
            arrival = compressor.decode(given, out, context)
            if arrival.bad:
                arrival.refuse()
        except MessageError:
            refused = True
        assert torch.equal(out, untouched) if refused else torch.isfinite(out).all()
        n_refused += refused
        for now, before in zip(ranks.snapshot(), states, strict=True):
            assert all(map(torch.equal, now, before))
    return n_refused


def damages(message: Tensor) -> Iterator[Tensor]:
    """Flipped bits in head and body; then numbers that cannot be, under a checksum that fits."""
    for place in (*range(10), len(message) - 1):
        damaged = message.clone()
        damaged[place] ^= 1 << 30
        yield damaged
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, -1e-20, torch.finfo(torch.float32).max])
    for place in (10, 13, *torch.randint(10, len(message), (10,), generator=generator).tolist()):
        for word in (*values.view(torch.int32).tolist(), -1):
            damaged = message.clone()
            damaged[place] = word
            resealed(damaged)
            yield damaged


def flipped(message: Tensor) -> Tensor:
    damaged = message.clone()
    damaged[-1] ^= 1
    return damaged


def resealed(message: Tensor) -> None:
    """The checksum of docs/wire-format.md."""
    message[8:10] = 0
    message[8:10] = reference.checksum(message)


@rows(ROWS)
def test_spec_and_repr_make_it_again(row: Row) -> None:
    assert from_spec(to_spec(row.compressor)) == row.compressor
    assert eval(repr(row.compressor), vars(gradwire)) == row.compressor
    assert replace(row.compressor) == row.compressor


def test_every_method_has_a_row() -> None:
    methods = {known.method for known in METHODS.values()}
    assert {type(row.compressor) for row in ROWS.values()} == methods
    for method in methods - {Dense, BF16, FP16}:
        assert "arXiv" in (sys.modules[method.__module__].__doc__ or ""), method

"""QSGD and the draws in Triton against plain torch, bit for bit: in Triton's interpreter, and on a GPU if there is one.

The interpreter is chosen when Triton is imported, so the cases run in another process: this file, as a script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted
from gradwire import QSGD
from gradwire.arithmetic import draws
from gradwire.arithmetic.finite import LARGEST
from gradwire.arithmetic.groups import groups_of
from gradwire.codec import fields
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.fixed import Body, split
from gradwire.methods.qsgd import definition as qsgd

CPU = torch.device("cpu")
SHAPES = [("none", (0,)), ("matrix", (31, 33)), ("scalar", ()), ("empty", (0, 4)), ("zeros", (600,)), ("last", (131,))]
LAYOUT = Layout.of(SHAPES)
WIDE = Layout.of([*SHAPES, ("wide", (5001,)), ("one", ())])
EMPTY = Layout.of([("none", (0,)), ("empty", (0, 4))])
TIE = (1 << 24) + 1  # between two float32 numbers


def kernels() -> Any:
    from gradwire.methods.qsgd import gpu

    return gpu


def gradient(layout: Layout, seed: int) -> Tensor:
    """Both signs, some binades, both zeros, whole groups of zeros and of denormals; seed 0: the largest numbers too."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(layout.numel, generator=generator) * torch.rand(layout.numel, generator=generator)
    grad[3], grad[4], grad[200:350] = 0.0, -0.0, -0.0
    grad[350:520] = torch.linspace(-1e-42, 1e-42, 170)
    if not seed:
        grad[600:604] = torch.tensor([3.4e38, -3.4028234663852886e38, 1e-45, -1e-45])
    grad[1024:1600] = 0.0
    return grad


def written(method: QSGD, grad: Tensor, context: Context, device: str) -> Body:
    groups = groups_of(context.layout, method.group)
    keys = draws.keys(method.seed, context.step, context.layout, context.rank)
    assert kernels().serves(groups)
    return Body(*kernels().write(grad.to(device), groups, keys, method.bits, method.norm == "max"))


def added(method: QSGD, bodies: Tensor, context: Context, device: str) -> Tensor:
    """Both ways, from bodies in the middle of messages; what came out of Triton's, over whatever lay there.

    Nothing is written if something is known to be bad.
    """
    inside = torch.full((len(bodies), bodies.shape[1] + 16), 7, dtype=torch.int32, device=device)
    inside[:, 11:-5] = bodies.to(device)
    out, ours = torch.zeros(context.layout.numel), torch.full((context.layout.numel,), torch.nan, device=device)
    groups = groups_of(context.layout, method.group)
    method.plain_add(*split(bodies, len(groups)), out, groups)
    share = 1 / len(bodies) / method.levels
    for bad in (True, False):
        assert ours.isnan().all()
        given = (share, groups, method.bits, ours, torch.tensor(bad, device=device))
        kernels().put(*split(inside[:, 11:-5], len(groups)), *given)
    assert torch.equal(ours.cpu(), out)
    assert torch.equal(ours.cpu().signbit(), out.signbit())
    return ours.cpu()


def check_method(device: str, method: QSGD, layout: Layout = LAYOUT) -> None:
    bodies = []
    for rank in range(3):
        context, grad = Context(layout, 5, world_size=3, rank=rank), gradient(layout, rank)
        wanted = method.plain_write(grad, groups_of(layout, method.group), context)
        found = written(method, grad, context, device)
        assert torch.equal(found.words.cpu(), wanted.words)
        bodies.append(found.words.cpu())
        alone = added(method, bodies[-1][None], context, device)
        assert found.sent_norm.dtype == torch.float32
        torch.testing.assert_close(found.sent_norm.cpu(), alone.abs().double().sum().float(), rtol=1e-5, atol=0)
    out = added(method, torch.stack(bodies), context, device)
    assert out.isfinite().all()
    assert len(out.unique()) > 10


def check_order(device: str) -> None:
    """Small squares that count or do not, by whom they meet first, beside squares that come to TIE squared."""
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(64):
        row = torch.zeros(512)
        row[:5] = torch.tensor([float(1 << 24), 5792.0, 84.0, 8.0, 7.0])
        row[5 : 9 + number % 7] = 0.125
        rows.append(row[torch.randperm(512, generator=generator)])
    layout, method = Layout.of([("rows", (64, 512))]), QSGD(4, 512)
    found = written(method, torch.stack(rows).flatten(), Context(layout, 0), device).words.cpu()
    wanted = method.norms(torch.stack(rows).flatten(), groups_of(layout, 512))
    assert wanted.unique().tolist() == [TIE - 1, TIE + 1]
    assert torch.equal(found[:64].view(torch.float32), wanted)


def check_ties(device: str) -> None:
    """With one level and the norm 1, an element as large as its draw is rounded down, the next larger one up."""
    layout, method = Layout.of([("row", (2000,))]), QSGD(2, 100, "max")
    chance = draws.uniform(0, 0, layout, CPU)
    for step, level in ((0.0, 0), (2.0**-24, 1)):
        grad = chance + step
        grad[::100] = -1.0
        words = written(method, grad, Context(layout, 0), device).words.cpu()
        codes = fields.unpack(words[20:], 2, 2000)
        assert words[:20].view(torch.float32).tolist() == [1.0] * 20
        assert codes.view(20, 100).unique(dim=0).tolist() == [[3] + 99 * [level]]


def check_broken(device: str) -> None:
    """Norms that no rank can have sent, in the first, a middle and the last group; words that mean nothing."""
    context, method = Context(LAYOUT, 0), QSGD(4, 128)
    n_groups, n_words = len(groups_of(LAYOUT, 128)), method.body_words(LAYOUT)
    bodies = torch.randint(-(1 << 31), (1 << 31) - 1, (7, n_words), dtype=torch.int32)
    norms = bodies[:, :n_groups].view(torch.float32)
    norms.uniform_()
    norms[1, 0], norms[2, 5], norms[4, -1], norms[6, 3] = torch.nan, torch.inf, -1e-45, -torch.inf
    norms[3, 0], norms[3, -1] = -0.0, LARGEST
    said, broken = method.read(bodies.to(device), context)
    assert broken.tolist() == [False, True, True, False, True, False, True]
    out = torch.full((LAYOUT.numel,), 9.0, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qsgd, "triton_ready", lambda device: True)
        method.put(said, out, broken.any(), context)
    assert out.eq(9.0).all()
    assert added(method, bodies[[0, 3, 5]], context, device).isfinite().all()


def check_empty(device: str) -> None:
    for layout, n_groups in ((EMPTY, 2), (Layout.of([]), 0)):
        context = Context(layout, 0)
        body = written(QSGD(), torch.zeros(0), context, device)
        assert body.words.tolist() == [0] * n_groups
        assert body.sent_norm.item() == 0
        added(QSGD(), body.words.cpu().expand(2, -1), context, device)


def check_draws(device: str) -> None:
    from gradwire.arithmetic import draws_gpu

    long = Layout.of([("a", (3, 1024)), *SHAPES, ("b", (1025,))])
    for layout in (long, LAYOUT, EMPTY, Layout.of([]), Layout.of([("one", ())])):
        for seed, step, rank in ((0, 0, 0), (-3, 12, 1), (1 << 40, 7, 2)):
            drawn = draws_gpu.bits(draws.keys(seed, step, layout, rank), layout, torch.device(device))
            assert drawn.dtype == torch.int32
            assert torch.equal(drawn.cpu(), draws.reference_bits(seed, step, layout, CPU, rank))


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(function.__name__)
        return function(*args)

    return call


def check_exchange(device: str) -> None:
    """The method itself, with groups that Triton serves and with wider ones."""
    for group, expected in ((512, ["write", "write", "put"]), (kernels().WIDEST + 1, [])):
        method, grads = QSGD(4, group), [gradient(LAYOUT, seed) for seed in range(2)]
        contexts = [Context(LAYOUT, 3, world_size=2, rank=rank) for rank in range(2)]
        pairs, out, calls = list(zip(grads, contexts, strict=True)), torch.empty(LAYOUT.numel, device=device), []
        wanted = torch.stack([method.plain_write(grad, groups_of(LAYOUT, group), at).words for grad, at in pairs])
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                patch.setattr(qsgd, "numba_ready", lambda device: False)
                patch.setattr(qsgd, "triton_ready", lambda device: True)
            for name in ("write", "put"):
                patch.setattr(kernels(), name, counted(getattr(kernels(), name), calls))
            found = torch.stack([method.encode(grad.to(device), None, None, at).data for grad, at in pairs])
            arrival = method.decode(found, out, contexts[0])
        assert calls == expected
        assert torch.equal(found[:, 10:].cpu(), wanted)
        assert not arrival.bad
        mean = torch.zeros(LAYOUT.numel)
        groups = groups_of(LAYOUT, group)
        method.plain_add(*split(wanted, len(groups)), mean, groups)
        assert torch.equal(out.cpu(), mean)


METHODS = [QSGD(*options, seed=7) for options in itertools.product((2, 3, 4, 8), (1, 7, 128, 512), qsgd.NORMS)]
CASES: dict[str, Callable[[str], None]] = {
    **{repr(method): lambda device, method=method: check_method(device, method) for method in METHODS},
    **{
        repr(method): lambda device, method=method: check_method(device, method, WIDE)
        for method in (QSGD(4, 1000), QSGD(3, 1100, "max"), QSGD(5, 4999), QSGD(6, 8192), QSGD(7, 8192, "max"))
    },
    "order": check_order,
    "ties": check_ties,
    "broken": check_broken,
    "empty": check_empty,
    "draws": check_draws,
    "exchange": check_exchange,
}


def serve() -> None:
    """In the interpreter."""
    import interpreter  # of tests/codec

    interpreter.mend()
    interpreted.serve(CASES)


# The interpreter takes its time: every third of the first 32, which has every number of bits, group and norm.
@pytest.mark.parametrize(
    "case", [case for number, case in enumerate(CASES) if number % 3 == 0 or number >= len(METHODS)]
)
def test_interpreted(case: str, interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: str) -> None:
    CASES[case]("cuda")


if __name__ == "__main__":
    serve()

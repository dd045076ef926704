"""PowerSGD against the paper's definition in float64, and where low rank, warm starts and sums can go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import PowerSGD, from_spec
from gradwire.exchange.in_process import CPU, InProcess
from gradwire.exchange.lockstep import in_lockstep
from gradwire.exchange.room import RoomPlan
from gradwire.exchange.step import Part, Step
from gradwire.layout import Layout
from gradwire.state.by_name import Store

SHAPES: list[tuple[int, ...]] = [(20, 30), (30,), (8, 3, 3, 3), (), (6, 5), (64, 48)]
LAYOUT = Layout.of((f"tensor{i}", shape) for i, shape in enumerate(SHAPES))
MATRIX = Layout.of([("weight", (40, 24))])


def gradient(step: int, rank: int = 0, layout: Layout = LAYOUT) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(100 * step + rank))


class Oracle:
    """The paper's algorithm 1 and 2, worker by worker, in NumPy and float64."""

    def __init__(self, method: PowerSGD, layout: Layout, world_size: int) -> None:
        self.method, self.layout, self.step = method, layout, 0
        self.errors = [np.zeros(layout.numel) for _ in range(world_size)]
        start = PowerSGD(method.rank, True, method.min_compression, method.seed).init(layout, CPU)
        self.queries = {name: basis.double().numpy().T for name, basis in start.basis.items()}

    def __call__(self, grads: list[Tensor]) -> np.ndarray[Any, Any]:
        wholes = [error + grad.double().numpy() for error, grad in zip(self.errors, grads, strict=True)]
        decoded = np.mean(wholes, 0)
        for slot in self.layout:
            part = slice(slot.offset, slot.offset + slot.numel)
            if slot.name not in self.queries:
                continue
            matrices = [whole[part].reshape(slot.shape[0], -1) for whole in wholes]
            query = self.queries[slot.name]
            if not self.method.warm_start:
                query = self.method._drawn(slot, self.step, CPU).double().numpy().T
            product = orthogonal(np.mean([matrix @ query for matrix in matrices], 0))
            query = np.mean([matrix.T @ product for matrix in matrices], 0)
            self.queries[slot.name] = query
            decoded[part] = (product @ query.T).ravel()
        self.step += 1
        for worker, whole in enumerate(wholes):
            for slot in self.layout:
                part = slice(slot.offset, slot.offset + slot.numel)
                self.errors[worker][part] = whole[part] - decoded[part] if slot.name in self.queries else 0
        return decoded


def orthogonal(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Modified Gram and Schmidt, column by column."""
    matrix = matrix.copy()
    for column in range(matrix.shape[1]):
        matrix[:, column] /= np.linalg.norm(matrix[:, column])
        for later in range(column + 1, matrix.shape[1]):
            matrix[:, later] -= (matrix[:, column] @ matrix[:, later]) * matrix[:, column]
    return matrix


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("warm_start", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_every_element_is_the_papers(rank: int, warm_start: bool, world_size: int) -> None:
    method = PowerSGD(rank, warm_start, min_compression=1.0)
    ranks, oracle = InProcess(method, LAYOUT, world_size), Oracle(method, LAYOUT, world_size)
    assert len(oracle.queries) == {1: 4, 2: 4, 5: 3}[rank]
    for step in range(6):
        grads = [gradient(step, worker) for worker in range(world_size)]
        done, wanted = ranks(grads), oracle(grads)
        # float32 beside float64; the steps build on each other's rounding
        np.testing.assert_allclose(done.mean.numpy(), wanted, rtol=0, atol=1e-4)
        for state, error in zip(ranks.states, oracle.errors, strict=True):
            np.testing.assert_allclose(state.residual.numpy(), error, rtol=0, atol=1e-4)


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    """Rank 2 sent with rank 4: the two rows too many find no direction, and nothing is divided by zero."""
    ranks = InProcess(PowerSGD(rank=4), MATRIX, 2)
    left, right = torch.randn(40, 2), torch.randn(2, 24)
    for step in range(4):
        given = (left @ right).flatten() * (step + 1)
        done = ranks([given, 3 * given])
        torch.testing.assert_close(done.mean, 2 * given, rtol=1e-5, atol=1e-4)
    full = torch.randn(MATRIX.numel)
    before = (full - ranks([full, full]).mean).norm()
    again = InProcess(PowerSGD(rank=4), MATRIX, 2)
    assert float(before) < 1.1 * float((full - again([full, full]).mean).norm())  # all four rows are in use again


def test_zeros_do_not_end_the_search() -> None:
    """A zero basis would stay zero: nothing would ever be sent again."""
    ranks, given = InProcess(PowerSGD(rank=2), MATRIX, 2), gradient(0, layout=MATRIX)
    fresh = InProcess(PowerSGD(rank=2), MATRIX, 2)([given] * 2).mean
    for _ in range(3):
        done = ranks([torch.zeros(MATRIX.numel)] * 2)
        assert done.finite
        assert not done.mean.any()
    assert torch.equal(ranks([given] * 2).mean, fresh)
    one_column = torch.zeros(40, 24)
    one_column[:, 3] = torch.randn(40)
    ranks([one_column.flatten()] * 2)
    assert all(bool(row.any()) for row in ranks.states[0].basis["weight"])


@pytest.mark.parametrize("exponent", [-110, -60, 60])
def test_the_size_of_a_gradient_does_not_matter(exponent: int) -> None:
    """By powers of two: no product of a small gradient with a small basis falls out of float32."""
    one, other = (InProcess(PowerSGD(rank=2), MATRIX, 2) for _ in range(2))
    for step in range(4):
        grads = [gradient(step, rank, MATRIX) for rank in range(2)]
        expected = one(grads).mean.double() * 2.0**exponent
        found = other([grad * 2.0**exponent for grad in grads]).mean.double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-5)


@pytest.mark.parametrize("uneven", [False, True], ids=["all used", "used by some"])
def test_three_workers_lose_nothing_together(uneven: bool) -> None:
    """mean (decoded + residual) = mean (old residual + gradient), also where a tensor has no gradient on one worker."""
    method = PowerSGD(rank=2)
    states = [method.init(LAYOUT, CPU) for _ in range(3)]
    for step in range(5):
        active = [torch.tensor([(k + step + rank) % 3 > 0 or not uneven for k in range(6)]) for rank in range(3)]
        grads = [torch.where(LAYOUT.spread(active[rank]), gradient(step, rank), 0.0) for rank in range(3)]
        before = [state.residual.clone() for state in states]
        contexts = [
            gradwire.methods.Context(LAYOUT, step, (), None if bool(mask.all()) else mask, 3) for mask in active
        ]
        under_way = Step(step, RoomPlan(dense=False))
        each = zip(states, contexts, grads, strict=True)
        parts = [Part(under_way, method, s, c, g.clone(), g, torch.empty_like(g)) for s, c, g in each]
        in_lockstep(parts)
        mean = parts[0].out
        assert all(torch.equal(one.out, mean) and one.arrival and bool(one.arrival.finite) for one in parts)
        total = sum(state.residual.double() + mean for state in states)
        expected = sum(old.double() + grad for old, grad in zip(before, grads, strict=True))
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
        assert all(torch.equal(state.basis[n], states[0].basis[n]) for state in states for n in state.basis)
    assert float(states[0].residual.abs().max()) > 0.1


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 7, 605, LAYOUT.numel - 1])
def test_one_bad_value_spoils_one_step_only(bad: float, place: int) -> None:
    ranks = InProcess(PowerSGD(rank=2), LAYOUT, 2)
    ranks([gradient(0, rank) for rank in range(2)])
    before = ranks.snapshot()
    spoiled = [gradient(1, rank) for rank in range(2)]
    good = [grad.clone() for grad in spoiled]
    spoiled[1][place], good[1][place] = bad, 0.0
    done = ranks(spoiled)
    assert not done.finite
    for undo in done.undo:
        undo()
    for rank, (old, new) in enumerate(zip(before, ranks.snapshot(), strict=True)):
        assert torch.equal(new[0], old[0] + good[rank])
        assert all(torch.equal(one, other) for one, other in zip(new[1:], old[1:], strict=True))
    done = ranks([gradient(2, rank) for rank in range(2)])
    assert done.finite
    assert bool(torch.isfinite(done.mean).all())


def test_a_zero_in_the_basis_hides_no_bad_value() -> None:
    """An input that was always zero has zeros in Q; inf times zero is NaN and still reaches the sum."""
    ranks = InProcess(PowerSGD(rank=2), MATRIX, 2)
    given = gradient(0, layout=MATRIX).view(40, 24)
    given[:, 5] = 0
    ranks([given.flatten()] * 2)
    assert not ranks.states[0].basis["weight"][:, 5].any()
    spoiled = given.clone()
    spoiled[3, 5] = torch.inf
    assert not ranks([spoiled.flatten(), given.flatten()]).finite


def test_a_good_step_that_is_taken_back() -> None:
    """A GradScaler may leave a step out because of another model: r + g to rounding, and the old basis."""
    ranks = InProcess(PowerSGD(rank=2), LAYOUT, 2)
    ranks([gradient(0, rank) for rank in range(2)])
    before, grads = ranks.snapshot(), [gradient(1, rank) for rank in range(2)]
    done = ranks(grads)
    assert done.finite
    assert not torch.equal(ranks.snapshot()[0][1], before[0][1])
    for undo in done.undo:
        undo()
    for old, new, grad in zip(before, ranks.snapshot(), grads, strict=True):
        torch.testing.assert_close(new[0], old[0] + grad, rtol=0, atol=1e-6)
        assert all(torch.equal(one, other) for one, other in zip(new[1:], old[1:], strict=True))


def test_the_start_is_normal_and_belongs_to_the_parameter() -> None:
    layout = Layout.of([("a", (3000, 4000)), ("b", (3000, 4000)), ("c", (3000,))])
    basis = PowerSGD(rank=8).init(layout, CPU).basis
    assert basis.keys() == {"a", "b"}
    values = basis["a"].flatten()
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.02
    assert abs(float((values**4).mean()) - 3) < 0.3
    assert not torch.equal(basis["a"], basis["b"])
    other = PowerSGD(rank=8).init(Layout.of([("c", (3000,)), ("a", (3000, 4000))]), CPU).basis
    assert torch.equal(other["a"], basis["a"])
    assert not torch.equal(PowerSGD(rank=8, seed=1).init(layout, CPU).basis["a"], basis["a"])


def test_a_cold_start_draws_anew_in_every_step() -> None:
    given = gradient(0, layout=MATRIX)
    ranks = InProcess(PowerSGD(rank=2, warm_start=False), MATRIX)
    assert not hasattr(ranks.states[0], "basis")
    means = []
    for _ in range(3):
        means.append(ranks([given]).mean)
        ranks.states[0].residual.zero_()
    assert not torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_a_warm_start_finds_the_best_low_rank_matrix() -> None:
    """One gradient again and again, nothing held back: Q turns into the first singular vectors."""
    torch.manual_seed(1)
    given = torch.randn(40, 24) @ torch.diag(0.8 ** torch.arange(24.0)) @ torch.linalg.qr(torch.randn(24, 24))[0]
    u, s, v = torch.linalg.svd(given)
    best = (given - u[:, :3] @ torch.diag(s[:3]) @ v[:3]).norm()
    ranks, errors = InProcess(PowerSGD(rank=3), MATRIX), []
    for _ in range(30):
        errors.append(float((given - ranks([given.flatten()]).mean.view(40, 24)).norm() / best))
        ranks.states[0].residual.zero_()
    assert errors[0] > 1.05
    assert 0.9999 < errors[-1] < 1.001


def test_bytes_are_those_of_two_thin_matrices_and_the_rest() -> None:
    layout = Layout.of([("a", (100, 60)), ("b", (100,)), ("c", (10, 10)), ("d", (32, 8, 3, 3))])
    done = InProcess(PowerSGD(rank=2), layout)([gradient(0, layout=layout)])
    assert done.n_bytes == 4 * (2 * 160 + 100 + 2 * 20 + 2 * (32 + 72))


def test_a_tensor_that_gains_too_little_goes_as_it_is() -> None:
    layout = Layout.of([("even", (8, 8)), ("column", (50, 1)), ("empty", (0, 4)), ("scalar", ())])
    assert not PowerSGD(rank=2).init(layout, CPU).basis  # 2 (8 + 8) 2 = 64 = 8 x 8
    assert list(PowerSGD(rank=2, min_compression=1.9).init(layout, CPU).basis) == ["even"]
    given = gradient(0, layout=layout)
    assert torch.equal(InProcess(PowerSGD(rank=2), layout)([given]).mean, given)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"rank": 1.5}, "rank must be a whole number, got 1.5"),
        ({"seed": True}, "seed must be a whole number, got True"),
        ({"min_compression": 0.5}, "min_compression must be a finite number >= 1, got 0.5"),
        ({"min_compression": float("nan")}, "min_compression must be a finite number >= 1, got nan"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PowerSGD(**options)


def test_its_spec() -> None:
    assert from_spec("powersgd:rank=2,warm_start=false") == PowerSGD(rank=2, warm_start=False)


def test_what_all_ranks_share_is_forgotten_by_all() -> None:
    """Which parameters hold something back differs from rank to rank, so a basis may not depend on it."""
    stores = [Store(lambda name, moment: None) for _ in range(2)]
    for rank, store in enumerate(stores):
        bucket = store.bucket(LAYOUT, PowerSGD(rank=2), CPU)
        bucket.state.residual[: 20 * 30] = float(rank)  # type: ignore[attr-defined]
        store.prune()
    assert [{name: list(fields) for name, fields in store.items()} for store in stores] == [
        {},
        {"tensor0": ["residual"]},
    ]

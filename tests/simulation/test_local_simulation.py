"""Virtual workers that take local steps: against a slow oracle, and what holds whatever the method is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
import scenes
from gradwire import VGC, Dense, LocalSimulation, PowerSGD, Simulation, TopK
from gradwire.errors import AttachError, CheckpointError
from gradwire.local_steps.recipe import RECIPES, Recipe, recipe_of
from simulation.local_oracle import Oracle, cut

HALVES = [["0.weight", "0.bias", "2.weight", "2.bias"], ["3.weight", "3.bias", "5.weight", "5.bias"]]


FLAGS = 3  # beside every exchange: who contributes, who finishes, whose statistics are finite


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 5)]
    return nn.Sequential(*layers)


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5))


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def batches(step: int, workers: int = 2) -> list[Tensor]:
    rows = [scenes.batch(step, rank, 4) for rank in range(workers)]
    return [torch.stack(tensors) for tensors in zip(*rows, strict=True)]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def simulated(given: Any, model: nn.Module | None = None, workers: int = 2, make: Any = adamw, **options: Any):
    return gradwire.simulate(model or network(), given, loss, workers=workers, optimizer=make, **options)


def advance(simulation: LocalSimulation, steps: range) -> list[str]:
    prints = []
    for step in steps:
        simulation.step(*batches(step, simulation.workers))
        prints.append(scenes.digest([simulation.weights, simulation.base, *simulation.model.buffers()]))
    return prints


def flat(simulation: LocalSimulation) -> Tensor:
    return torch.cat([p.detach().flatten() for p in simulation.model.parameters()])


# ---- against the oracle

METHODS = [
    Recipe(Dense(), 3),
    Recipe(TopK(density=0.1, exact=True), 3, decay=0.8),
    Recipe(VGC(alpha=0, density=0.2), 3, decay=0.8),
    Recipe(gradwire.QSGD(bits=3, group=32), 3, decay=0.8),
    Recipe(PowerSGD(rank=1, min_compression=1.0), 3, decay=0.8),
    Recipe(Dense(), 2, outer_lr=0.7, outer_momentum=0.9),
    Recipe(TopK(density=0.2, exact=True), 2, outer_lr=0.7, outer_momentum=0.9, nesterov=False),
    Recipe(Dense(), 4, fragments=2),
    Recipe(TopK(density=0.1, exact=True), 4, fragments=2, delay=3, outer_momentum=0.5),
    Recipe(VGC(alpha=0, density=1.0), 4, fragments=2, delay=1, mixing=0.3),
    Recipe(Dense(), 1),
]
PRESETS = [recipe_of(name, every=8, **({"fragments": 2} if RECIPES[name]().fragments > 1 else {})) for name in RECIPES]


@pytest.mark.parametrize("recipe", [*METHODS, *PRESETS], ids=repr)
def test_agrees_with_the_oracle(recipe: Recipe) -> None:
    """To the rounding of the outer step, which the oracle writes in another order: three rounds and one step."""
    simulation = simulated(recipe)
    names = list(simulation.parameters)
    fragments = [names] if recipe.fragments == 1 else HALVES
    oracle = Oracle(network(), recipe, fragments, 2, adamw)
    start, moved = cut(oracle.base, names), 0.0
    for step in range(3 * recipe.every + 1):
        simulation.step(*batches(step))
        oracle.step(loss, *batches(step))
        torch.testing.assert_close(simulation.base, cut(oracle.base, names), rtol=2e-5, atol=2e-6)
        for rank in range(2):
            wanted = cut(oracle.weights(rank), names)
            torch.testing.assert_close(simulation.weights[rank], wanted, rtol=2e-5, atol=2e-6)
        assert torch.equal(flat(simulation), simulation.base)
        moved = float((simulation.base - start).norm())
    assert moved > 0.05


@pytest.mark.parametrize("method", [Dense(), TopK(density=0.1, exact=True)], ids=repr)
def test_one_fragment_without_a_delay_is_the_plain_thing_bit_for_bit(method: Any) -> None:
    plain = Oracle(
        network(), recipe := Recipe(method, 3, decay=0.5), [list(dict(network().named_parameters()))], 2, sgd
    )
    simulation, mixed = simulated(recipe, make=sgd), simulated(recipe, make=sgd, mixing=0.3, fragments=1, delay=0)
    for step in range(7):
        simulation.step(*batches(step))
        mixed.step(*batches(step))
        plain.step(loss, *batches(step))
        for rank in range(2):
            assert torch.equal(simulation.weights[rank], cut(plain.weights(rank), list(simulation.parameters)))
        assert torch.equal(simulation.weights, mixed.weights)
    assert not torch.equal(*simulation.weights)


@pytest.mark.parametrize("workers", [1, 3])
def test_dense_after_every_step_is_data_parallel(workers: int) -> None:
    """To rounding: the mean of steps is the step of the mean, for SGD."""
    simulation, model = simulated(Dense(), workers=workers, make=sgd, every=1), network()
    parallel, optimizer = gradwire.simulate(model, Dense(), loss, workers=workers), sgd(list(model.parameters()))
    assert isinstance(parallel, Simulation)
    for step in range(6):
        simulation.step(*batches(step, workers))
        parallel.backward(*batches(step, workers))
        optimizer.step()
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(flat(simulation), wanted, rtol=1e-4, atol=1e-6)


HELD = [
    TopK(density=0.05, exact=True),
    VGC(alpha=0, density=0.05),
    gradwire.QSGD(bits=2),
    PowerSGD(rank=1, min_compression=1.0),
    gradwire.SignSGD(),
]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("method", HELD, ids=repr)
def test_nothing_is_lost(method: Any, messages: bool) -> None:
    """The base and what is held back account for every delta: base_0 - base + mean e = the sum of the mean deltas."""
    simulation = simulated(Recipe(method, 2, decay=1.0, fragments=2), workers=3, messages=messages)
    start, given = simulation.base.clone(), torch.zeros_like(simulation.base)
    for step in range(8):
        before = simulation.weights.clone()
        seen = spied(simulation)
        simulation.step(*batches(step, 3))
        for number, deltas in seen:
            names = HALVES[number]
            slots = [slot for slot in simulation.layout if slot.name in names]
            given[slots[0].offset : slots[-1].offset + slots[-1].numel] += deltas.mean(0)
        assert not torch.equal(before, simulation.weights)
    held = [torch.stack([s.residual for s in one.ranks.states]).mean(0) for one in simulation.fragments]
    torch.testing.assert_close(start - simulation.base + torch.cat(held), given, rtol=1e-4, atol=1e-6)
    assert float(torch.cat(held).norm()) > 1e-3


def spied(simulation: LocalSimulation) -> list[tuple[int, Tensor]]:
    """(fragment, deltas) of the exchanges from now on."""
    seen: list[tuple[int, Tensor]] = []
    for number, fragment in enumerate(simulation.fragments):
        exchange = type(fragment.ranks).exchange.__get__(fragment.ranks)

        def watched(grads: Tensor, *rest: Any, number: int = number, exchange: Any = exchange) -> Any:
            seen.append((number, grads.clone()))
            return exchange(grads, *rest)

        fragment.ranks.exchange = watched  # type: ignore[method-assign]
    return seen


def test_messages_that_are_not_written_change_no_bit() -> None:
    recipe = Recipe(VGC(alpha=0, density=0.05), 2, fragments=2)
    prints = [advance(simulated(recipe, workers=3, messages=kind), range(6)) for kind in (True, False)]
    assert prints[0] == prints[1]


# ---- workers that go wrong


def poisoned(step: int, ranks: list[int], workers: int = 2) -> list[Tensor]:
    inputs, targets = batches(step, workers)
    inputs[ranks] = torch.nan
    return [inputs, targets]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("method", [Dense(), TopK(density=0.1, exact=True), VGC(alpha=0, density=0.1)], ids=repr)
def test_a_worker_that_goes_wrong_contributes_nothing(method: Any, messages: bool) -> None:
    simulation = simulated(Recipe(method, 3, decay=0.5), messages=messages)
    advance(simulation, range(3))
    held = [getattr(state, "residual", torch.zeros(0)).clone() for state in simulation.fragments[0].ranks.states]
    before = simulation.base.clone()
    for step in (3, 4):
        simulation.step(*poisoned(step, [1]))
    assert bool(simulation.weights[1].isnan().any())
    assert simulation.optimizers[1].state
    seen = spied(simulation)
    simulation.step(*batches(5))
    deltas = seen[0][1]
    assert float(deltas[0].norm()) > 0
    assert not bool(deltas[1].any())
    if isinstance(method, Dense):  # divided by both
        assert torch.equal(simulation.base, before - deltas[0] / 2)
    else:
        after = [state.residual for state in simulation.fragments[0].ranks.states]
        assert torch.equal(after[1], held[1])
        assert not torch.equal(after[0], held[0])
    assert not torch.equal(simulation.base, before)
    assert torch.equal(simulation.weights[1], simulation.base)
    assert not simulation.optimizers[1].state
    assert simulation.optimizers[0].state
    advance(simulation, range(6, 9))
    assert bool(simulation.weights.isfinite().all())
    assert len(simulation.optimizers[1].state) == len(simulation.parameters)


@pytest.mark.parametrize("delay", [0, 2, 3])
def test_it_recovers_with_fragments_and_rounds_on_their_way(delay: int) -> None:
    """Also where it goes wrong between two fragments: what is left of it would spoil the other one again."""
    recipe = Recipe(TopK(density=0.2, exact=True), 4, fragments=2, delay=delay, outer_momentum=0.9, outer_lr=0.5)
    simulation = simulated(recipe, with_batch_norm(), workers=3)
    for step in range(16):
        simulation.step(*(poisoned(step, [2], 3) if step in (4, 5, 9) else batches(step, 3)))
        assert bool(simulation.base.isfinite().all())
        assert all(bool(b.isfinite().all()) for b in simulation.model.buffers())
    assert bool(simulation.weights.isfinite().all())
    assert all(bool(b.isfinite().all()) for one in simulation.replicas for b in one.module.buffers())


def test_of_a_worker_that_begins_anew_nothing_is_left_in_a_round_on_its_way() -> None:
    """It went wrong while the first fragment's round was on its way, and stands still after its new beginning."""
    simulation = simulated(Recipe(Dense(), 4, fragments=2, delay=3), make=sgd)
    advance(simulation, range(6))
    simulation.step(*poisoned(6, [1]))
    assert simulation.fragments[0].flight
    simulation.optimizers[1].param_groups[0]["lr"] = 0.0
    advance(simulation, range(7, 9))
    assert not simulation.fragments[0].flight
    first = simulation.fragments[0]
    assert torch.equal(first.weights[1], first.base)
    assert not torch.equal(first.weights[0], first.base)


def test_where_all_go_wrong_the_base_stays() -> None:
    simulation = simulated(Recipe(TopK(density=0.2, exact=True), 2, outer_momentum=0.9, outer_lr=0.5))
    advance(simulation, range(2))
    assert simulation.momentum is not None
    base, momentum = simulation.base.clone(), simulation.momentum.clone()
    held = [state.residual.clone() for state in simulation.fragments[0].ranks.states]
    assert bool(momentum.any())
    for step in (2, 3):
        simulation.step(*poisoned(step, [0, 1]))
    assert torch.equal(simulation.base, base)
    assert torch.equal(simulation.momentum, momentum)
    assert all(torch.equal(row, base) for row in simulation.weights)
    after = [state.residual for state in simulation.fragments[0].ranks.states]
    assert all(torch.equal(*pair) for pair in zip(held, after, strict=True))
    advance(simulation, range(4, 6))
    assert not torch.equal(simulation.base, base)


# ---- state


RESUMED = [
    Recipe(TopK(density=0.1, exact=True), 4, fragments=2, delay=3, outer_momentum=0.9),
    Recipe(VGC(alpha=0, density=0.1), 4, delay=2, mixing=0.5),
    Recipe(PowerSGD(rank=1, min_compression=1.0), 3),
    Recipe(gradwire.QSGD(), 2, buffers="keep"),
]


@pytest.mark.parametrize("recipe", RESUMED, ids=repr)
@pytest.mark.parametrize("stop", [5, 7])
def test_goes_on_bit_for_bit_in_mid_round(recipe: Recipe, stop: int) -> None:
    whole = simulated(recipe, with_batch_norm(), workers=3, clip=0.5)
    wanted = advance(whole, range(12))
    assert len(set(wanted)) == 12
    first = simulated(recipe, with_batch_norm(), workers=3, clip=0.5)
    advance(first, range(stop))
    if recipe.delay and stop == 5:
        assert any(fragment.flight for fragment in first.fragments)
    state = first.state_dict()
    advance(first, range(stop, stop + 2))  # the state is a copy
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    torch.manual_seed(7)
    other = with_batch_norm()
    with torch.no_grad():
        for tensor in (*other.parameters(), *(b for b in other.buffers() if b.is_floating_point())):
            tensor.add_(1)
    second = simulated(recipe, other, workers=3, clip=0.5)
    second.load_state_dict(torch.load(file, weights_only=True))
    torch.randn(5)  # what others draw changes nothing
    assert advance(second, range(stop, 12)) == wanted[stop:]


def test_where_a_round_has_just_ended_none_is_left_after_loading() -> None:
    first, second = simulated(Dense(), every=2), simulated(Dense(), every=2)
    advance(first, range(4))
    second.load_state_dict(first.state_dict())
    second.finish()
    assert second.stats().exchanges == 0
    assert torch.equal(second.base, first.base)


def test_a_state_of_something_else_is_refused() -> None:
    simulation = simulated(TopK(density=0.1), every=2)
    with pytest.raises(CheckpointError, match="not the state of a simulation of local steps"):
        simulation.load_state_dict({"workers": []})
    for other, message in (
        (simulated(TopK(density=0.1), every=2, workers=3), "3 workers and 1 fragments"),
        (simulated(TopK(density=0.1), every=2, outer_momentum=0.5), "outer_momentum"),
        (simulated(TopK(density=0.1), with_batch_norm(), every=2), "other parameters"),
    ):
        with pytest.raises(CheckpointError, match=message):
            simulation.load_state_dict(other.state_dict())


# ---- buffers


def statistics(simulation: LocalSimulation) -> Tensor:
    return torch.stack([one.module[1].running_mean for one in simulation.replicas])  # type: ignore[index]


def test_statistics_are_averaged_in_a_round() -> None:
    simulation = simulated(Dense(), with_batch_norm(), every=3)
    lonely = simulated(Dense(), with_batch_norm(), every=99, buffers="keep")
    start = simulation.model[1].running_mean.clone()
    for step in range(3):
        assert torch.equal(simulation.model[1].running_mean, start)
        simulation.step(*batches(step))
        lonely.step(*batches(step))
    own = statistics(lonely)
    assert not torch.equal(*own)
    assert all(torch.equal(row, (own[0] + own[1]) / 2) for row in statistics(simulation))
    assert torch.equal(simulation.model[1].running_mean, (own[0] + own[1]) / 2)
    assert int(simulation.model[1].num_batches_tracked) == 3
    assert simulation.stats().bytes_sent == 4 * (simulation.layout.numel + 2 * 8 + FLAGS)


def test_statistics_with_a_delay() -> None:
    """The mean of those that were sent, and what each has changed by since."""
    simulation = simulated(Dense(), with_batch_norm(), every=3, delay=1)
    advance(simulation, range(3))
    sent = statistics(simulation)
    simulation.fragments[0].land = lambda recipe: None  # type: ignore[method-assign]
    land, simulation.buffers.land = simulation.buffers.land, lambda: None  # type: ignore[method-assign]
    advance(simulation, range(3, 4))
    now = statistics(simulation)
    land()
    torch.testing.assert_close(statistics(simulation), sent.mean(0) + now - sent)
    torch.testing.assert_close(simulation.model[1].running_mean, sent.mean(0))


def test_statistics_that_are_kept() -> None:
    simulation = simulated(Dense(), with_batch_norm(), every=3, buffers="keep")
    advance(simulation, range(6))
    own = statistics(simulation)
    assert not torch.equal(*own)
    assert torch.equal(simulation.model[1].running_mean, own[0])
    assert simulation.stats().bytes_sent == 2 * 4 * (simulation.layout.numel + FLAGS)


# ---- the rest


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 3}, {"fragments": 2, "delay": 2, "mixing": 0.5}])
def test_the_last_round_takes_what_was_trained_since(options: dict[str, Any]) -> None:
    simulation = simulated(Dense(), every=4, **options)
    advance(simulation, range(9))
    before, ahead = simulation.base.clone(), simulation.weights.clone()
    assert not torch.equal(ahead[0], before)
    simulation.finish()
    assert all(torch.equal(row, simulation.base) for row in simulation.weights)
    assert torch.equal(flat(simulation), simulation.base)
    assert not torch.equal(simulation.base, before)
    if not options:
        torch.testing.assert_close(simulation.base, ahead.mean(0))
    done, sent = simulation.base.clone(), simulation.stats().bytes_sent
    simulation.finish()  # nothing is left to do
    assert torch.equal(simulation.base, done)
    assert simulation.stats().bytes_sent == sent
    advance(simulation, range(9, 16))
    assert not torch.equal(simulation.base, done)


def test_gradients_are_clipped_by_worker() -> None:
    def descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    simulation = simulated(Dense(), make=descent, every=9, clip=0.01)
    free = simulated(Dense(), make=descent, every=9)
    simulation.step(*batches(0))
    free.step(*batches(0))
    lengths = [float(row.norm()) for row in simulation.weights - simulation.base]
    assert lengths == pytest.approx([0.01, 0.01], rel=1e-3)
    assert all(float(row.norm()) > 0.1 for row in free.weights - free.base)


def test_what_was_sent() -> None:
    simulation = simulated(TopK(density=0.1, exact=True), every=5, fragments=2)
    advance(simulation, range(10))
    stats, numel = simulation.stats(), simulation.layout.numel
    kept = sum(max(1, int(0.1 * slot.numel)) for slot in simulation.layout)
    assert (stats.steps, stats.exchanges, stats.dense_steps) == (10, 4, 0)
    assert stats.dense_bytes == 10 * 4 * numel
    assert sum(stats.elements_sent.values()) == 2 * kept
    assert stats.ratio == pytest.approx(10 * numel / (2 * kept))
    assert 4 * 2 * kept < stats.bytes_sent < 8 * 2 * kept + 4 * 64
    assert stats.bytes_a_step == stats.bytes_sent / stats.steps
    assert stats.delay > 5
    simulation.reset_stats()
    assert simulation.stats().dense_bytes == 0


def test_a_budget_is_of_an_inner_step_on_average() -> None:
    simulation = simulated(VGC(alpha=0, max_bytes_per_step=60), every=20, fragments=2)
    advance(simulation, range(40))
    stats = simulation.stats()
    assert stats.exchanges == 4
    assert 20 < stats.bytes_sent / stats.steps <= 60  # tiny tensors leave much of their room empty
    with pytest.raises(AttachError, match="an exchange of one fragment"):
        simulated(VGC(alpha=0, max_bytes_per_step=10), every=2)


def test_a_density_that_changes_in_mid_run() -> None:
    simulation = simulated(TopK(density=0.5, exact=True), every=2)
    advance(simulation, range(2))
    held = simulation.fragments[0].ranks.states[0].residual.clone()
    simulation.reset_stats()
    simulation.compressor = "topk:density=0.1,exact=true"
    assert torch.equal(simulation.fragments[0].ranks.states[0].residual, held)
    advance(simulation, range(2, 4))
    assert simulation.stats().ratio > 2 * 8
    with pytest.raises(TypeError, match="same method"):
        simulation.compressor = Dense()


def test_every_worker_draws_its_own_numbers_and_the_caller_his() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 5))
    same = [tensor[:1].expand(2, *tensor.shape[1:]) for tensor in batches(0)]
    simulation = simulated(Dense(), model, every=5)
    torch.manual_seed(5)
    wanted = torch.randn(3)
    torch.manual_seed(5)
    losses = simulation.step(*same)
    assert float(losses[0]) != float(losses[1])
    assert torch.equal(torch.randn(3), wanted)


def test_schedules_frozen_parameters_and_names() -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    simulation = simulated("diloco:every=2", model)
    assert simulation.recipe == recipe_of("diloco", every=2)
    assert simulated("topk:density=0.1", every=3, decay=0.5).recipe == Recipe(TopK(density=0.1), 3, decay=0.5)
    for optimizer in simulation.optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[0]["weight_decay"] = 0.0
    before = simulation.base.clone()
    advance(simulation, range(4))
    assert torch.equal(simulation.base, before)
    assert torch.equal(model[0].weight, frozen)
    assert "LocalSimulation(Recipe(" in repr(simulation)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="local steps need optimizer="):
        gradwire.simulate(network(), "diloco", loss, workers=2)
    with pytest.raises(ValueError, match="optimizer, clip, delay means something in local steps alone"):
        simulated(Dense(), clip=1.0, delay=2)
    with pytest.raises(ValueError, match="second moments by sample"):
        simulated(VGC(alpha=1.0), every=2)
    with pytest.raises(ValueError, match="4 layers"):
        simulated(Dense(), every=9, fragments=5)
    with pytest.raises(AttachError, match=r"0\.weight is torch\.float64"):
        simulated(Dense(), network().double(), every=2)
    with pytest.raises(AttachError, match="no parameter"):
        simulated(Dense(), network().requires_grad_(False), every=2)
    with pytest.raises(TypeError, match=r"it made \[\]"):
        simulated(Dense(), every=2, make=lambda parameters: [])
    with pytest.raises(ValueError, match="a row for each of the 2 workers"):
        simulated(Dense(), every=2).step(*batches(0, 3))

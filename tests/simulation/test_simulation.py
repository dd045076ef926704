"""Virtual workers: bit for bit what real processes compute, send and keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
import scenes
from gradwire import VGC, Dense, PowerSGD, Simulation, Strom, TopK
from gradwire.errors import AttachError, CheckpointError, GradwireError
from gradwire.simulation.random_state import seed_worker

STEPS = 12
SEED = 3


def network() -> nn.Module:
    """With batch norm, whose statistics are each worker's own, and dropout, whose draws are."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(24, 24)]
    return nn.Sequential(*layers, nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 5))


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def batches(step: int, workers: int, size: int = 8) -> list[Tensor]:
    rows = [scenes.batch(step, rank, size) for rank in range(workers)]
    return [torch.stack(tensors) for tensors in zip(*rows, strict=True)]


def simulated(compressor: Any, workers: int, **options: Any) -> tuple[Simulation, torch.optim.Optimizer]:
    torch.set_num_threads(1)  # as each real worker has: another number of threads adds in another order
    model = network()
    return gradwire.simulate(model, compressor, loss, workers=workers, seed=SEED, **options), scenes.sgd(model)


def advance(simulation: Simulation, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    prints = []
    for step in steps:
        optimizer.zero_grad()
        simulation.backward(*batches(step, simulation.workers))
        optimizer.step()
        prints.append(scenes.digest(simulation.model.parameters()))
    return prints


def real(compressor: Any) -> tuple[list[str], dict[str, Any], dict[str, Tensor], Any]:
    """The same training by one of several real workers."""
    model = scenes.ddp(network())
    wire = gradwire.attach(model, compressor)
    seed_worker(SEED, dist.get_rank())
    prints = list(scenes.train(model, range(STEPS), scenes.sgd(model)))
    return prints, wire.state_dict(), dict(model.module.named_buffers()), wire.stats()


HELD = [
    VGC(alpha=1.0),
    VGC(alpha=0, density=0.05),
    VGC(alpha=1.5, tau=0.02),
    VGC(alpha=0.2, momentum=0.5),
    Strom(tau=0.02),
]
FIXED = [TopK(density=0.1), gradwire.QSGD()]
# A dense step is an all-reduce, and a ring of three adds in another order than we do: with two there is only one.
PAIRS = [(method, 2) for method in (*HELD, *FIXED, Dense())] + [(method, 3) for method in FIXED]


@pytest.mark.parametrize(("compressor", "workers"), PAIRS, ids=repr)
def test_agrees_with_real_processes_bit_for_bit(spawn, compressor, workers):
    simulation, optimizer = simulated(compressor, workers)
    prints = advance(simulation, optimizer, range(STEPS))
    results = spawn(workers, real, compressor)
    assert len(set(prints)) == STEPS
    assert all(prints == theirs for theirs, *_ in results)
    assert all(torch.equal(b, results[0][2][n]) for n, b in simulation.model.named_buffers())
    names = ("format", "step", "rank", "world_size", "compressor", "powers")
    for ours, (_, theirs, _, _) in zip(simulation.state_dict()["workers"], results, strict=True):
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


@pytest.mark.parametrize("compressor", [VGC(alpha=1.0), VGC(alpha=0.2, momentum=0.5), Strom(tau=0.02)], ids=repr)
def test_state_counts_and_buffers_of_every_worker(spawn, compressor):
    """Two workers, where a sum of two numbers has one order; real ones send their message in ten buckets."""
    simulation, optimizer = simulated(compressor, 2)
    advance(simulation, optimizer, range(STEPS))
    results = spawn(2, real, compressor)
    for rank, (ours, (_, theirs, buffers, _)) in enumerate(
        zip(simulation.state_dict()["workers"], results, strict=True)
    ):
        assert ours["passed"] == theirs["passed"]
        torch.testing.assert_close(ours["parameters"], theirs["parameters"], rtol=0, atol=0)
        own = dict(simulation.replicas[rank].module.named_buffers())
        if rank == 0:  # DDP gives every rank the buffers of rank 0 before a forward pass
            torch.testing.assert_close(own, buffers, rtol=0, atol=0)
    stats, others = simulation.stats(), [each[3] for each in results]
    counts = {name: sum(one.elements_sent[name] for one in others) for name in stats.elements_sent}
    assert stats.elements_sent == {name: round(count / 2) for name, count in counts.items()}
    assert (stats.steps, stats.dense_steps) == (others[0].steps, others[0].dense_steps)
    assert stats.bytes_sent < others[0].bytes_sent <= stats.bytes_sent + STEPS * 10 * 64  # heads of ten buckets


@pytest.mark.parametrize("compressor", [Dense(), gradwire.BF16(), PowerSGD(rank=2, min_compression=1.0)], ids=repr)
def test_sums_agree_to_rounding(spawn, compressor):
    """A ring of three adds in another order than we do, and BF16's ring rounds after every addition."""
    simulation, optimizer = simulated(compressor, 3)
    advance(simulation, optimizer, range(3))
    for theirs in spawn(3, three_steps, compressor):
        tolerance = 2e-2 if isinstance(compressor, gradwire.BF16) else 1e-4
        found = [p.detach() for p in simulation.model.parameters()]
        torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance / 10)


def three_steps(compressor: Any) -> list[Tensor]:
    model = scenes.ddp(network())
    gradwire.attach(model, compressor)
    seed_worker(SEED, dist.get_rank())
    list(scenes.train(model, range(3), scenes.sgd(model)))
    return [p.detach() for p in model.parameters()]


RESUMED = [VGC(alpha=1.0), VGC(alpha=0.2, momentum=0.5), PowerSGD(rank=2, min_compression=1.0), Dense()]


@pytest.mark.parametrize("compressor", RESUMED, ids=repr)
def test_goes_on_bit_for_bit(compressor, tmp_path):
    whole, optimizer = simulated(compressor, 3)
    wanted = advance(whole, optimizer, range(8))
    first, optimizer = simulated(compressor, 3)
    advance(first, optimizer, range(5))
    content = {"simulation": first.state_dict(), "model": first.model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "state.pt")
    content = torch.load(tmp_path / "state.pt", weights_only=True)
    second, optimizer = simulated(compressor, 3)
    second.model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    second.load_state_dict(content["simulation"])
    torch.randn(5)  # what others draw changes nothing
    assert advance(second, optimizer, range(5, 8)) == wanted[5:]


def test_a_real_worker_goes_on_from_a_virtual_one(spawn):
    simulation, optimizer = simulated(VGC(alpha=1.0), 2)
    advance(simulation, optimizer, range(5))
    held = [state["parameters"]["0.weight"]["residual"] for state in simulation.state_dict()["workers"]]
    states = simulation.state_dict()["workers"]
    for found, wanted in zip(spawn(2, loaded, states), held, strict=True):
        assert torch.equal(found, wanted)


def loaded(states: list[dict[str, Any]]) -> Tensor:
    wire = gradwire.attach(scenes.ddp(network()), VGC(alpha=1.0))
    wire.load_state_dict(states[dist.get_rank()])
    return scenes.state_of(wire, "residual")["0.weight"]


def test_a_bad_value_makes_all_nan_and_loses_nothing():
    simulation, optimizer = simulated(VGC(alpha=1.0), 2)
    advance(simulation, optimizer, range(4))
    inputs, targets = batches(4, 2)
    inputs[1, 0, 0] = torch.inf
    before = simulation.state_dict()["workers"]
    simulation.backward(inputs, targets)
    assert all(bool(p.grad.isnan().all()) for p in simulation.model.parameters())
    after = simulation.state_dict()["workers"]
    assert all(bool(f.isfinite().all()) for w in after for p in w["parameters"].values() for f in p.values())
    assert after[0]["passed"] == before[0]["passed"]


def test_the_callers_random_numbers_go_on():
    simulation, optimizer = simulated(VGC(alpha=1.0), 2)
    torch.manual_seed(5)
    wanted = torch.randn(3)
    torch.manual_seed(5)
    advance(simulation, optimizer, range(2))
    assert torch.equal(torch.randn(3), wanted)


def test_refusals():
    model = network()
    with pytest.raises(ValueError, match="at least 1"):
        gradwire.simulate(model, VGC(), loss, workers=0)
    with pytest.raises(AttachError, match="trains"):
        gradwire.simulate(model.eval(), VGC(), loss, workers=2)
    with pytest.raises(AttachError, match="no parameter"):
        gradwire.simulate(network().requires_grad_(False), VGC(), loss, workers=2)
    simulation, _ = simulated(VGC(), 2)
    with pytest.raises(ValueError, match="a row for each of the 2 workers"):
        simulation.backward(*batches(0, 3))
    with pytest.raises(CheckpointError, match="not the state of a simulation"):
        simulation.load_state_dict({"workers": []})
    other, _ = simulated(VGC(), 3)
    with pytest.raises(CheckpointError, match="3 workers"):
        simulation.load_state_dict(other.state_dict())
    unused = nn.ModuleDict({"used": nn.Linear(12, 5), "unused": nn.Linear(2, 2)})
    simulation = gradwire.simulate(unused, VGC(), lambda m, x, y: loss(m["used"], x, y), workers=2)
    with pytest.raises(GradwireError, match=r"unused\.weight"):
        simulation.backward(*batches(0, 2))


@pytest.mark.parametrize("messages", [True, False])
def test_other_options_in_mid_run(spawn, messages):
    simulation, optimizer = simulated(VGC(alpha=1.0), 2, messages=messages)
    prints = advance(simulation, optimizer, range(4))
    simulation.compressor = VGC(alpha=2.0)
    prints += advance(simulation, optimizer, range(4, 8))
    assert spawn(2, retuned)[0] == prints
    with pytest.raises(TypeError, match="same method"):
        simulation.compressor = Dense()


def test_where_the_variance_counts_for_nothing_it_is_not_made():
    """An alpha whose variance is rounded away chooses the same elements, with messages and without."""
    prints = []
    for alpha, messages in ((1e-30, True), (0.0, True), (0.0, False)):
        simulation, optimizer = simulated(VGC(alpha=alpha, density=0.05), 2, messages=messages)
        assert [replica.recorder is None for replica in simulation.replicas] == [not alpha] * 2
        prints.append(advance(simulation, optimizer, range(STEPS)))
    assert prints[0] == prints[1] == prints[2]
    with pytest.raises(ValueError, match="has no second moments"):
        simulation.compressor = VGC(alpha=1.0, density=0.05)


def retuned() -> list[str]:
    model = scenes.ddp(network())
    wire, optimizer = gradwire.attach(model, VGC(alpha=1.0)), scenes.sgd(model)
    seed_worker(SEED, dist.get_rank())
    prints = list(scenes.train(model, range(4), optimizer))
    wire.compressor = VGC(alpha=2.0)
    return prints + list(scenes.train(model, range(4, 8), optimizer))


def test_the_model_itself_is_left_alone():
    simulation, optimizer = simulated(VGC(alpha=1.0), 2)
    forwards = [module.__dict__.get("forward") for module in simulation.model.modules()]
    advance(simulation, optimizer, range(2))
    assert [module.__dict__.get("forward") for module in simulation.model.modules()] == forwards
    assert all(one.module is not simulation.model for one in simulation.replicas)
    pointers = [p.data_ptr() for p in simulation.model.parameters()]
    assert all([p.data_ptr() for p in one.module.parameters()] == pointers for one in simulation.replicas)

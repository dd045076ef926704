"""Virtual workers on a GPU: their passes as one graph, their exchange without messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import VGC, LocalSimulation, PowerSGD, Simulation, TopK
from gradwire.tools.train.text import ByteTransformer


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes [B], or of one class a position [B, T]."""
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def convolutional(capture: bool, messages: bool) -> tuple[Simulation, torch.optim.Optimizer]:
    """On a GPU, without dropout: a graph draws other numbers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)).cuda()
    simulation = gradwire.simulate(model, VGC(alpha=1.0), loss, workers=4, capture=capture, messages=messages)
    return simulation, torch.optim.SGD(model.parameters(), lr=0.01)


def pictures() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        inputs = torch.randn(4, 8, 3, 16, 16, generator=generator)
        yield inputs.cuda(), inputs.flatten(2).sum(2).argsort(1).cuda() % 10


def transformer(capture: bool, messages: bool, device: str = "cuda") -> tuple[Simulation, torch.optim.Optimizer]:
    """As the experiments have it: embeddings, positions without a batch axis, layer norms."""
    torch.manual_seed(0)
    model = ByteTransformer(context=12, width=32, heads=2, depth=2).to(device)
    simulation = gradwire.simulate(model, VGC(alpha=1.0), loss, workers=4, capture=capture, messages=messages)
    return simulation, torch.optim.SGD(model.parameters(), lr=0.01)


def sentences(device: str = "cuda") -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(0, 256, (4, 8, 13), generator=generator).to(device)
        yield tokens[..., :-1], tokens[..., 1:]


Batches = Iterator[tuple[Tensor, Tensor]]


def in_turn(made: tuple[Simulation, torch.optim.Optimizer], batches: Batches) -> tuple[list[Tensor], Any]:
    simulation, optimizer = made
    for batch in batches:
        simulation.backward(*batch)
        optimizer.step()
    return [p.detach() for p in simulation.model.parameters()], simulation.stats()


def test_every_moment_of_the_transformer_is_exact():
    """Estimates cannot be captured."""
    simulation, optimizer = transformer(capture=False, messages=True, device="cpu")
    in_turn((simulation, optimizer), sentences("cpu"))
    recorder = simulation.replicas[0].recorder
    assert recorder is not None
    assert {row.kind for row in recorder.coverage()} == {"exact"}


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "batches"), [(convolutional, pictures), (transformer, sentences)])
def test_a_graph_of_all_workers_on_gpu(make, batches):
    """Sums of the same numbers by other kernels, and what is nearly undecided may fall on the other side."""
    eager, sent = in_turn(make(capture=False, messages=True), batches())
    graph, again = in_turn(make(capture=True, messages=True), batches())
    for one, two in zip(eager, graph, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)
    assert abs(sent.ratio / again.ratio - 1) < 0.05
    assert sent.ratio > 2


@pytest.mark.gpu
def test_messages_that_are_not_written_change_no_bit_on_gpu():
    """Of the same gradients: a backward on a GPU has atomic additions, and does not repeat bit for bit itself."""
    counted, optimizer = convolutional(capture=True, messages=False)
    written, _ = convolutional(capture=False, messages=True)
    for batch in pictures():
        counted.backward(*batch)
        done = written.ranks.exchange(counted.gradients.clone(), counted.moments.clone())
        grads = [p.grad for p in counted.parameters.values()]
        assert torch.equal(done.mean, torch.cat([grad.flatten() for grad in grads if grad is not None]))
        optimizer.step()
    ours, theirs = counted.ranks.snapshot(), written.ranks.snapshot()
    assert all(torch.equal(*pair) for states in zip(ours, theirs, strict=True) for pair in zip(*states, strict=True))
    sent, again = written.stats(), counted.stats()
    assert sent.bytes_sent == again.bytes_sent
    assert sent.elements_sent == again.elements_sent


def locally(compressor: Any, capture: bool, messages: bool) -> tuple[LocalSimulation, list[Tensor]]:
    """The base weights after every step."""
    torch.manual_seed(0)
    model = ByteTransformer(context=12, width=32, heads=2, depth=2).cuda()
    simulation = gradwire.simulate(
        model,
        compressor,
        loss,
        workers=4,
        every=2,
        fragments=2,
        delay=1,
        clip=1.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        capture=capture,
        messages=messages,
    )
    bases = []
    for batch in [*sentences(), *sentences()]:
        simulation.step(*batch)
        bases.append(simulation.base.clone())
    return simulation, bases


METHODS = [
    VGC(alpha=0, density=0.1),
    TopK(density=0.1, exact=True),
    PowerSGD(rank=2),
    gradwire.QSGD(),
    gradwire.Dense(),
]


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_local_steps_of_all_workers_as_graphs_on_gpu(compressor):
    """Passes and exchange are captured. AdamW makes whole steps of rounding where a gradient is zero but for it."""
    eager, wanted = locally(compressor, capture=False, messages=True)
    graph, found = locally(compressor, capture=True, messages=False)
    for one, two in zip(wanted, found, strict=True):
        assert float((one - two).norm()) < 0.2 * float((one - wanted[0]).norm()) + 0.02
    assert float((found[-1] - found[0]).norm()) > 0.1
    assert eager.stats().bytes_sent == pytest.approx(graph.stats().bytes_sent, rel=0.05)
    assert torch.equal(torch.cat([p.detach().flatten() for p in graph.model.parameters()]), graph.base)


@pytest.mark.gpu
def test_a_worker_that_goes_wrong_between_two_graphs_on_gpu():
    """Its round is none of those that were captured; the next ones are again."""
    simulation, _ = locally(TopK(density=0.1, exact=True), capture=True, messages=False)
    assert all(fragment.ranks.repeated is not None for fragment in simulation.fragments)
    simulation.weights[1] = torch.nan
    for batch in sentences():
        simulation.step(*batch)
    assert bool(simulation.weights.isfinite().all())
    assert bool(simulation.base.isfinite().all())

"""What all workers share in the middle of a round, and figures of sums that are late; with real processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes


def net_with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def in_mid_round():
    model = net_with_statistics()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wire = gradwire.local(model, optimizer, "bf16", every=4)
    trained(model, optimizer, 4)
    at_the_round = scenes.digest(floats(model))
    trained(model, optimizer, 2)
    own = scenes.digest(floats(model))
    with wire.base_weights():
        shared = scenes.digest(floats(model))
    return at_the_round, shared, own, scenes.digest(floats(model))


def floats(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, and the running statistics of the batch norm."""
    return [value.detach() for value in model.state_dict().values() if value.is_floating_point()]


def test_base_weights_come_with_the_shared_statistics(spawn):
    """Each worker has its own in the middle of a round, and they are back afterwards."""
    found = spawn(2, in_mid_round)
    for at_the_round, shared, own, after in found:
        assert shared == at_the_round == found[0][1]
        assert own == after != shared
    assert found[0][2] != found[1][2]


def late():
    model = net_with_statistics()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wire = gradwire.local(model, optimizer, "bf16", every=4, delay=3)
    trained(model, optimizer, 5)  # the round of step 4 is on its way
    wire.wait()
    waited = wire.stats()
    wire.wait()  # once more does nothing
    trained(model, optimizer, 2)
    return waited.bytes_sent, wire.stats().bytes_sent, waited.exchanges, wire.stats().rounds


def test_figures_of_a_late_sum_are_there_after_wait(spawn):
    for waited, after, exchanges, rounds in spawn(2, late):
        n_parameters = 6 * 5 + 5 + 2 * 5 + 5 * 2 + 2
        assert waited == after == 2 * n_parameters + 4 * (3 + 10)  # bf16; three numbers, and the statistics
        assert (exchanges, rounds) == (1, 1)

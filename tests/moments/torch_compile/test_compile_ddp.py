"""torch.compile inside and outside of DDP on real processes: the operators survive its splitting of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC


class Net(nn.Module):
    """A convolution, a norm, Linears at several positions, one of them twice; 2.1 MB, which DDP's splitting needs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv1d(3, 64, 2, stride=2), nn.LayerNorm(64)
        self.mix, self.widen = nn.Linear(64, 64, bias=False), nn.Linear(64, 4096)
        self.narrow, self.head = nn.Linear(4096, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x.view(-1, 3, 4)).transpose(1, 2))
        x = self.mix(self.mix(x).relu_())
        return self.head(self.narrow(torch.tanh(self.widen(x))).mean(1))


def trained(order: str) -> tuple[list[str], dict[str, Tensor], set[str], int]:
    """(fingerprints after every step, residuals, kinds of moments, graphs with a layer)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs = 0

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += any(node.target is torch.ops.gradwire.layer for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    inner: nn.Module = Net()
    model: Any = DistributedDataParallel(
        torch.compile(inner, backend=backend) if order == "inside" else inner,
        bucket_cap_mb=1,
    )
    wire = gradwire.attach(model, VGC(alpha=1.0), strict=True)
    called = torch.compile(model, backend=backend) if order == "outside" else model
    prints = list(scenes.train(model, range(6), scenes.sgd(model), lambda _, x: called(x)))
    residuals = {name: state["residual"] for name, state in wire.state_dict()["parameters"].items()}
    return prints, residuals, {row.kind for row in wire.coverage()}, graphs


@pytest.mark.slow
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_replicas_are_equal_and_train_as_in_eager_mode(spawn: Any, order: str) -> None:
    eager, ours = spawn(2, trained, "eager"), spawn(2, trained, order)
    assert ours[0][0] == ours[1][0]
    assert all(kinds == {"exact"} for _, _, kinds, _ in ours)
    assert ours[0][3] == 3  # parts of one graph, compiled once
    for (_, residuals, _, _), (_, wanted, _, _) in zip(ours, eager, strict=True):
        for name, residual in residuals.items():
            close = torch.isclose(residual, wanted[name], rtol=1e-3, atol=1e-5)
            assert close.float().mean() > 0.98, name  # rounding may tip an element that stands on the edge

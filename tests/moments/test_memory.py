"""What moments need on the way: nothing that grows with batch times weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.moments import Recorder
from gradwire.moments.cpu.grad_and_moment import WORKSPACE

from .oracle import trainable


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


WIDE: dict[str, Any] = {
    "Linear": (lambda: nn.Linear(300, 310), (8, 2, 300)),
    "Conv2d": (lambda: nn.Conv2d(64, 64, 5), (8, 64, 5, 5)),
    "Embedding": (lambda: nn.Embedding(5000, 20), (8, 3)),
}


def largest_of(name: str, batch: int) -> tuple[int, int]:
    """Elements of the largest tensor that a forward and backward makes, and of the weight."""
    make, shape = WIDE[name]
    net, shape = make(), (batch, *shape[1:])
    x = torch.randint(0, 5000, shape) if name == "Embedding" else torch.randn(shape)
    recorder = Recorder(net, trainable(net), strict=True)
    with Largest() as largest:
        net(x).square().sum().backward()
    recorder.remove()
    return largest.numel, net.weight.numel()


@pytest.mark.parametrize("name", WIDE)
def test_nothing_of_batch_times_weights_is_made(name: str) -> None:
    largest, weights = largest_of(name, 8)
    assert weights <= largest < 2 * weights, "8 samples, and not one buffer for all of them"


@pytest.mark.parametrize("name", WIDE)
def test_many_samples_share_a_workspace_that_does_not_grow(name: str) -> None:
    largest, weights = largest_of(name, 64)
    limit = max(2 * weights, WORKSPACE)
    assert limit < 64 * weights / 10
    assert weights <= largest <= limit

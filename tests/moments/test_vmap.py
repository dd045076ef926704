"""Against torch.func.vmap(grad), the definition itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .oracle import Root, assert_equal, recorded, trainable


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


LAYERS: dict[str, Any] = {
    "Linear": (lambda: nn.Linear(4, 3), lambda: floats(5, 6, 4)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=1), lambda: floats(5, 2, 5, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(4, eps=0.3), lambda: floats(5, 6, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4, eps=0.3), lambda: floats(5, 4, 3, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), lambda: torch.randint(0, 7, (5, 6))),
    "MultiheadAttention": (SelfAttention, lambda: floats(5, 6, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_moment_is_that_of_vmap(name: str) -> None:
    torch.manual_seed(0)
    layer, x = (make() for make in LAYERS[name])
    root = Root(layer.double())

    def loss(params: dict[str, Tensor], sample: Tensor) -> Tensor:
        output = functional_call(layer, params, (sample[None],))
        return (output.pow(3) + output).sum()

    params = {key: value.detach() for key, value in layer.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0))(params, x)
    wanted = {f"layer.{key}": value.square().sum(0) for key, value in each.items()}

    def whole() -> Tensor:
        output = root(torch.empty(5), x)
        return (output.pow(3) + output).sum()

    assert trainable(root).keys() == wanted.keys()
    assert_equal(recorded(root, whole), wanted)

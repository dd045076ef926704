"""The table of optimizers a run can use. They run on the decoded mean gradient, after the exchange.

The plain ones have no momentum: where much is held back that may be better (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from gradwire.tools.input_errors import InputError

Maker = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "plain": torch.optim.SGD,
    "plain-adam": partial(torch.optim.Adam, betas=(0.0, 0.999)),
    "plain-adamw": partial(torch.optim.AdamW, betas=(0.0, 0.999)),
    "sgd": partial(torch.optim.SGD, momentum=0.9),  # unless the method has the momentum in what it holds back
}


def find(name: str) -> Maker:
    """The optimizer called `name`, or an error that lists those there are."""
    if name not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {name!r}. Known optimizers: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def make(
    name: str,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    fused: bool = False,
    momentum: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimizer `name` on `parameters`; fused: one kernel for all of them, for GPUs; momentum: the method's own."""
    options = {"fused": True} if fused else {}
    if name == "sgd" and momentum:
        # the weights decay through the optimizer's momentum too, which makes 1 / (1 - m) of it
        name, weight_decay = "plain", weight_decay / (1 - momentum)
    return find(name)(parameters, lr=learning_rate, weight_decay=weight_decay, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate

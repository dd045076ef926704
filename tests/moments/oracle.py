"""The slow truth: every sample's gradient by autograd, squared and summed; and the recorder run beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments import Recorder

Moments = dict[str, Tensor]


class Root(nn.Module):
    """A layer under a root that is told the batch size by a probe: bags and weights have no batch axis in front."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, probe: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class Labelled(Root):
    """The probe meets the output, as labels do: sample by sample, along the axis of its only dim that is not 1."""

    def forward(self, probe: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = self.layer(*args, **kwargs)
        output = found[0] if isinstance(found, tuple) else found
        labels = torch.zeros_like(probe, dtype=output.dtype)
        output = output + labels.reshape(*probe.shape, *[1] * (output.ndim - probe.ndim))
        return (output, *found[1:]) if isinstance(found, tuple) else output


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in net.named_parameters() if param.requires_grad}


def by_sample(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Moments:
    """sum_b (d loss_b)^2, each loss differentiated alone; losses() runs the model, unwatched, on what it likes."""
    names = trainable(net)
    moments = {name: torch.zeros_like(param) for name, param in names.items()}
    for loss in losses():
        found = torch.autograd.grad(loss, list(names.values()), retain_graph=True, allow_unused=True)
        for name, value in zip(names, found, strict=True):
            if value is not None:
                moments[name] += value.square()
    return moments


def recorded(net: nn.Module, loss: Callable[[], Tensor], root: nn.Module | None = None, **options: Any) -> Moments:
    """What a recorder finds in one backward, which must be exact throughout."""
    recorder = Recorder(root or net, trainable(net), strict=True, **options)
    try:
        net.zero_grad()
        loss().backward()
        return {name: recorder.moment(name).clone() for name in recorder.accounts}
    finally:
        recorder.remove()


def assert_equal(found: Moments, wanted: Moments, rtol: float = 1e-10) -> None:
    """Relative to the largest element of each: small ones are differences of large ones. Never both empty.

    A gradient g that is a difference of terms near 1 (a LayerNorm's) has their rounding, some eps, and g^2 that times
    2 g: of g = 1e-6 the 1e-10th part and more, by the machine. For g above 1e-4 that is nothing.
    """
    assert found.keys() == wanted.keys()
    assert found
    for name, truth in wanted.items():
        scale = truth.abs().max() if truth.numel() else torch.tensor(0.0)
        off = (found[name] - truth).abs().max() if truth.numel() else torch.tensor(0.0)
        rounding = 8 * torch.finfo(torch.float64).eps * 2 * scale.double().sqrt()
        assert off <= rtol * scale + rounding, f"{name}: off by {float(off):.3g}, largest {float(scale):.3g}"


def consume_all(recorder: Recorder) -> None:
    """As the DDP adapter does when a step is over."""
    for name, account in recorder.accounts.items():
        if account.param.grad is not None:
            recorder.consume(name, account.param.grad.reshape(-1))

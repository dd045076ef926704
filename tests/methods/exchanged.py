"""One exchange of a method without a state: its bytes, and what they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.layout import Layout
from gradwire.methods import Context


def bytes_and_mean(method: Any, grads: list[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    context, out = Context(layout, 5, world_size=2), torch.full((layout.numel,), torch.nan)
    every = [method.encode(grad, grad, None, replace(context, rank=rank)) for rank, grad in enumerate(grads)]
    data = torch.stack([message.data for message in every])
    method.decode(data, out, context)
    assert torch.isfinite(out).all()
    return data, out

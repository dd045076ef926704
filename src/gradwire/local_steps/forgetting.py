"""What an optimizer forgets when a worker starts over: whatever is not finite, so that it does not break again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def forget_what_broke(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """A parameter whose state has numbers that are not finite begins anew."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if not all(_finite(value) for value in state.values()):
                del optimizer.state[parameter]


def _finite(value: object) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    to_local = getattr(value, "to_local", None)  # of a sharded parameter: each rank looks at its own part
    return bool(torch.isfinite(value if to_local is None else to_local()).all())

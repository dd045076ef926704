"""DDP's own all-reduce, with no hook of ours in between: what can be seen of it from outside.

A hook costs a pass over the gradient and some Python a bucket, and DDP never gives it up again. So a reducer that may
yet turn out to need none has this instead, until another method than Dense is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.exchange.counting import Meter
from gradwire.layout import Layout

SELDOM = 100  # steps: how often DDP times itself if nobody says otherwise


@dataclass(frozen=True)
class Passes:
    """One step by DDP's own clock, in seconds. waited: for the last sum, after the backward."""

    layouts: list[Layout]
    forward: float
    backward: float
    waited: float


class Plain:
    """hook_up: puts the hook in, for good."""

    def __init__(
        self, model: DistributedDataParallel, parameters: dict[str, nn.Parameter], hook_up: Callable[[], None]
    ) -> None:
        self._model, self.hook_up = weakref.ref(model), hook_up
        self._sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self.layout = Layout.of(self._shapes.items())
        self.n_bytes = sum(self._sizes.values())
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None

    def steps_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of this one ends a step of the model: where there are several, one of them does."""
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        return self._optimizer() is optimizer

    def watch(self, closely: bool) -> None:
        """Has DDP time every step, or one now and then."""
        model = self._model()
        assert model is not None  # who asks for it holds it
        model._set_ddp_runtime_logging_sample_rate(1 if closely else SELDOM)  # type: ignore[no-untyped-call]

    def count(self, meter: Meter) -> None:
        """A step in which DDP has summed everything."""
        meter.count(self.n_bytes, self.n_bytes, self.n_bytes)
        meter.everything(self.layout)
        meter.end_step(dense=True)

    def passes(self) -> Passes:
        """Of the last step that DDP has timed. What it does not time is 0, and a step is then all there is to see."""
        model = self._model()
        assert model is not None
        seen: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        forward, backward = seen.get("forward_compute_time", 0), seen.get("backward_compute_time", 0)
        waited = seen.get("backward_comm_time_end", 0) - seen.get("backward_compute_time_end", 0)
        sizes = seen.get("rebuilt_bucket_sizes") or seen.get("bucket_sizes") or str(self.n_bytes)
        layouts = list(self._cut([int(size) for size in sizes.split(",")]))
        return Passes(layouts, 1e-9 * forward, 1e-9 * backward, max(0.0, 1e-9 * waited))

    def _cut(self, sizes: list[int]) -> Iterator[Layout]:
        """Buckets of so many bytes, taken from the last parameter to the first, as gradients come."""
        names, end, taken = list(reversed(self._sizes)), 0, 0
        for size in sizes:
            end += size
            bucket = []
            while names and taken < end:
                taken += self._sizes[names[0]]
                bucket.append(names.pop(0))
            if bucket:
                yield Layout.of((name, self._shapes[name]) for name in bucket)

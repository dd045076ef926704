"""What is on its way: the buckets of one step, as the courier's thread and the backward's see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import GradwireError
from gradwire.exchange.budget import Budget
from gradwire.exchange.courier import Flight
from gradwire.exchange.room import Plan
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Gather, State


@dataclass
class Bucket:
    """The flat tensors of one bucket: the compressor's state and the second moment of the step under way."""

    layout: Layout
    state: State
    moment: Tensor


@dataclass
class Parcel:
    """One bucket on its way: DDP's flat gradient goes in, the mean over the ranks comes back in its place."""

    bucket: Bucket
    buffer: Tensor
    active: Tensor | None
    scale: Tensor | None  # of a GradScaler: r and v are kept in units of 1
    ready: torch.cuda.Event | None
    future: Future[Tensor]

    def unscaled(self) -> tuple[Tensor, Tensor]:
        """Gradient and moment in float32 and units of 1: g / S and m / S^2."""
        grad, moment = self.buffer.float(), self.bucket.moment
        if self.scale is None:
            return grad, moment
        return grad / self.scale, moment / self.scale / self.scale


@dataclass
class Sent:
    """A parcel whose message is on its way; summed: in a dense step, all that was held back too."""

    compressor: Gather
    parcel: Parcel
    context: Context
    data: Tensor
    flight: Flight
    summed: Flight | None = None


@dataclass
class Step:
    """One synced backward. Its futures are resolved together, because one bad bucket makes all of them NaN."""

    number: int
    plan: Plan
    tensors_left: int  # of the model: DDP's own word for the last bucket is wrong in a static graph's first step
    budget: Budget | None = None  # where the ranks gather how long their steps take
    parcels: list[Parcel] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    clear: list[Callable[[], None]] = field(default_factory=list)
    arrivals: list[tuple[Layout, Arrival]] = field(default_factory=list)
    beside: list[Future[bool]] = field(default_factory=list)  # of tensors that are summed without the courier
    done: bool = False

    @property
    def futures(self) -> list[Future[Any]]:
        """Somebody waits for each."""
        return [*(parcel.future for parcel in self.parcels), *self.beside]

    def take_back(self) -> None:
        """Every sent element gets its r and v back, as they were before the send."""
        changes, self.undo = self.undo, []
        try:
            for change in changes:
                change()
        except Exception as error:
            raise GradwireError(
                f"what this step had sent could not be taken back ({type(error).__name__}: {error}), so what is held "
                "back is not what it was: go on from a checkpoint"
            ) from error

    def read(self) -> tuple[bool, list[tuple[Layout, list[int]]]]:
        """(all finite, counts by bucket) of a step; the only place where the host waits for a GPU, once a step."""
        parts: list[Tensor] = [torch.zeros(0, dtype=torch.int32)] if not self.arrivals else []
        for _, arrival in self.arrivals:
            parts.append(torch.stack([arrival.finite, arrival.bad]).int())
            if arrival.passed is not None:
                parts.append(arrival.passed)
        numbers = iter(torch.cat(parts).tolist())
        finite, counts = True, []
        for layout, arrival in self.arrivals:
            finite &= bool(next(numbers))
            if next(numbers):
                arrival.refuse()
            if arrival.passed is not None:
                counts.append((layout, [next(numbers) for _ in layout]))
        return finite, counts


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """On a GPU: marks where the backward's stream stands now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event

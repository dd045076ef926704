"""What a compressor is: hyper-parameters in a frozen dataclass, state in a dataclass of tensors, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from gradwire.layout import Layout


@dataclass(frozen=True)
class Context:
    """What encode and decode must know beside the tensors; the same on every rank but for `active`."""

    layout: Layout
    step: int
    capacity: tuple[int, ...]  # elements that fit into a message, by tensor
    active: Tensor | None = None  # bool [K]: tensors with a gradient in this step; None: all


@dataclass
class Message:
    """One rank's bytes for one bucket, with what it takes to undo the send."""

    data: Tensor  # int32, of a length that all ranks know
    undo: Callable[[], None]  # puts r and v of the sent elements back as they were before the send
    sent: Tensor  # integers [K], elements sent of each tensor
    passed: Tensor  # int32 [K], elements of each tensor that asked for room
    sent_norm: Tensor  # float32 [], |sent|_1


@dataclass
class Arrival:
    """What the messages of all ranks said beside the gradient: on the device, so that nobody waits for it yet."""

    finite: Tensor  # bool []
    passed: Tensor  # int32 [K]: the largest count over the ranks, -1 where no rank had a gradient
    bad: Tensor  # bool []: a message is not what it should be; then nothing was decoded
    refuse: Callable[[], None]  # raises what is wrong with it, in words


class State(Protocol):
    """A dataclass of flat tensors, one element a parameter element.

    Each field's metadata declares its `power`: on k = W'/W times as many workers it becomes k^power times the sum
    over the old workers that come together.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def powers(state: State) -> dict[str, int]:
    """How each field goes over to another number of workers."""
    return {f.name: f.metadata["power"] for f in fields(state)}


def tensors(state: State) -> dict[str, Tensor]:
    """The fields of a state by name."""
    return {f.name: getattr(state, f.name) for f in fields(state)}


S = TypeVar("S", bound=State)


@runtime_checkable
class Gather(Protocol[S]):
    """A method whose messages are gathered: every rank decodes all of them in rank order."""

    needs_moments: ClassVar[bool]

    def init(self, layout: Layout, device: torch.device) -> S: ...

    def encode(self, grad: Tensor, moment: Tensor, state: S, context: Context) -> Message: ...

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival: ...

    def words(self, numel: int, room: int) -> int:
        """Words in a message's body for a tensor of `numel` elements of which `room` fit."""
        ...

    def waiting(self, state: S, context: Context) -> Tensor:
        """Everything that is held back, [N], for a step in which everything is sent; a tensor of its own."""
        ...

    def clear(self, state: S, context: Context) -> None:
        """After that step: nothing is held back."""
        ...


@runtime_checkable
class Sum(Protocol):
    """A method whose tensors are summed by an all-reduce: no message, no state."""

    needs_moments: ClassVar[bool]

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype: ...


Compressor = Gather[Any] | Sum

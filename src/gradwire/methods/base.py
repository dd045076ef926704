"""What a compressor is: hyper-parameters in a frozen dataclass, state in a dataclass of tensors, nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gradwire.layout import Layout, Slot


@dataclass(frozen=True)
class Context:
    """What encode and decode must know beside the tensors; the same on every rank but for `active` and `rank`."""

    layout: Layout
    step: int
    capacity: tuple[int, ...] = ()  # elements that fit into a message, by tensor; for methods that need room
    active: Tensor | None = None  # bool [K]: tensors with a gradient in this step; None: all
    world_size: int = 1
    dense: bool = False  # everything is sent beside the message, which then carries nothing
    rank: int = 0  # of the one that encodes: what it rounds by chance is independent of what the others do
    density: float | None = None  # that a budget allows in this step; None: as the method's options say
    bare: bool = False  # messages of one length have no head: they stay in this process

    def only(self, flat: Tensor) -> Tensor:
        """[N] with zeros in the tensors that have no gradient in this step."""
        return flat if self.active is None else torch.where(self.layout.spread(self.active), flat, 0.0)

    def clear(self, flat: Tensor) -> None:
        """flat [N] becomes zero in the tensors that have a gradient in this step."""
        if self.active is None:
            flat.zero_()
        else:
            flat.masked_fill_(self.layout.spread(self.active), 0.0)


@dataclass
class Message:
    """One rank's bytes for one bucket, with what it takes to undo the send."""

    data: Tensor  # int32, of a length that all ranks know
    undo: Callable[[], None]  # puts the state of what was sent back as it was before the send
    sent: Tensor | None  # integers [K], elements sent of each tensor; None: all of them
    passed: Tensor | None  # int32 [K], elements of each tensor that asked for room
    sent_norm: Tensor  # float32 [], |sent|_1
    finite: Tensor | None = None  # bool []: of the gradient, where the message has no head to say it


@dataclass
class Arrival:
    """What the messages of all ranks said beside the gradient: on the device, so that nobody waits for it yet."""

    finite: Tensor  # bool []
    passed: Tensor | None  # int32 [K]: the largest count over the ranks, -1 where no rank had a gradient
    bad: Tensor  # bool []: a message is not what it should be; then nothing was decoded
    refuse: Callable[[], None]  # raises what is wrong with it, in words


@dataclass
class Outcome:
    """What the sums of one bucket came to."""

    mean: Tensor  # float32 [N]
    finite: Tensor  # bool []
    undo: Callable[[], None]  # as a message's
    sent: Tensor | None  # integers [K]; None: all elements
    sent_norm: Tensor  # float32 [], |sent|_1


SAME = -1  # the power of a field that is the same on every rank
OWN = -2  # of one that means nothing to another worker: on another number of workers it is gone


class State(Protocol):
    """A dataclass of flat tensors, one element a parameter element. What is held back is the field `residual`.

    Each field's metadata declares its `power`: on k = W'/W times as many workers it becomes k^power times the sum
    over the old workers that come together. A field of power SAME is a dict of tensors of any shape by parameter name,
    equal on every rank: it goes over as it is.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass
class Nothing:
    """The state of a method that holds nothing back."""


def powers(state: State) -> dict[str, int]:
    """How each field goes over to another number of workers."""
    return {f.name: f.metadata["power"] for f in fields(state)}


def of_slot(state: State, slot: Slot) -> dict[str, Tensor]:
    """One parameter's part of every field: views."""
    parts: dict[str, Tensor] = {}
    for name in powers(state):
        value = getattr(state, name)
        if not isinstance(value, dict):
            parts[name] = slot.of(value)
        elif slot.name in value:
            parts[name] = value[slot.name]
    return parts


def tensors(state: State) -> list[Tensor]:
    """All tensors of a state, always in the same order."""
    values = [getattr(state, f.name) for f in fields(state)]
    return [tensor for value in values for tensor in (value.values() if isinstance(value, dict) else [value])]


class Compressor(ABC):
    """A method: a Gather, a Rounds or a Sum. Here: what is asked of all of them, and what most of them answer."""

    kind: ClassVar[str]  # "gather", "rounds" or "sum": which collectives it takes
    needs_room: ClassVar[bool] = False  # its messages are as long as the counts of the step before ask for

    @property
    def needs_moments(self) -> bool:
        """Whether second moments by sample are made for it; it is given none where not."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether something of a gradient may wait in its state, in the field `residual`."""
        return False

    @property
    def alike(self) -> bool:
        """Whether nothing in a step depends on its number, so that it can be repeated as a CUDA graph."""
        return False

    @property
    def share(self) -> float | None:
        """The share of every tensor's elements that its options let pass; None: they do not say."""
        return None

    @property
    def most_bytes(self) -> int | None:
        """How many bytes a worker's messages of a step may have; None: as many as it takes."""
        return None

    @property
    def most_rate(self) -> float | None:
        """How many bytes a second a worker's link may carry upwards; None: as many as it can."""
        return None

    @property
    def own_momentum(self) -> float:
        """SGD's momentum, where it is in what the method holds back."""
        return 0.0

    def init(self, layout: Layout, device: torch.device) -> Any:
        """The state of one bucket."""
        return Nothing()

    def words(self, numel: int, room: int) -> int:
        """Words in a message's body for a tensor of `numel` elements of which `room` fit."""
        raise AssertionError(f"the messages of {self!r} need no room")

    def waiting(self, state: Any, context: Context) -> Tensor:
        """Everything that is held back, [N], for a step in which everything is sent; a tensor of its own."""
        raise AssertionError(f"{self!r} holds nothing back")

    def clear(self, state: Any, context: Context) -> None:
        """After that step: nothing is held back."""
        raise AssertionError(f"{self!r} holds nothing back")


class Gather(Compressor):
    """A method whose messages are gathered: every rank decodes all of them in rank order."""

    kind = "gather"

    @abstractmethod
    def encode(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> Message:
        """Steps 2 to 4 for one bucket: changes the state, returns the bytes."""

    @abstractmethod
    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = mean over the ranks, in rank order, of what each message [W, words] says; nothing changes on error."""


class Rounds(Compressor):
    """A method of one or more sums a bucket, one after another, each made of what the one before came to."""

    kind = "rounds"

    @abstractmethod
    def rounds(self, grad: Tensor, state: Any, context: Context) -> Generator[Tensor, Tensor, Outcome]:
        """Yields a tensor, is sent its sum over the ranks, and so on. A value that is not finite goes into the sums.

        The gradient [N] is the method's own: the mean may be written over it.
        """

    def everything(self, grad: Tensor, state: Any, context: Context) -> Generator[Tensor, Tensor, Outcome]:
        """The rounds of a step in which all that is held back goes out with the gradient: one sum."""
        whole = context.only(grad) + self.waiting(state, context)
        norm = whole.abs().sum()
        mean = yield whole.mul_(1 / context.world_size)
        good = context.only(torch.where(torch.isfinite(grad), grad, 0.0))
        return Outcome(mean, torch.isfinite(mean).all(), lambda: state.residual.add_(good), None, norm)


class Sum(Compressor):
    """A method whose tensors are summed by one all-reduce of DDP's own kind: no message, no state."""

    kind = "sum"

    @abstractmethod
    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a gradient of `dtype` travels."""


def checked(given: Any) -> Compressor:
    """`given`, if it is a compressor."""
    if not isinstance(given, Compressor):
        raise TypeError(
            f"expected a compressor such as gradwire.VGC(alpha=1.5), or its spec, 'vgc:alpha=1.5', got {given!r}"
        )
    return given

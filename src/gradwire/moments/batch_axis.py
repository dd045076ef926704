"""Step 1, moments: where the samples lie in what each layer puts out: followed through the model, not measured.

An axis that is as long as the batch may be so by chance: positions of a block as long as the batch, tokens that an
expert happens to get. So the model is run once without values on a batch of unusual size (fake_forward.py),
and what every layer then puts out says where the samples are, whatever the numbers are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.batch_dim import inner_of

Key = tuple[str, str, int]  # the layer's name, its part, the number of dims of what it puts out
MOST = 8  # kinds of input that are followed: sequences may come in every length
REST = 0  # rows in front of or behind each sample's: as many as there are
NOT_MET = "it was not called when the batch axis was followed through the model"
BEST = "; two micro-batches and more estimate it best"
SEVERAL = "it is called with the samples along different axes, and which call this is cannot be told" + BEST
NOWHERE = "no axis of what it puts out is the batch's: it is the same for all samples" + BEST
POSITIONS = NOWHERE + ', or if it is positions, added to every sample alike, say batch_dim={its module: "positions"}'
BY_DATA = "which sample each of its rows belongs to is decided by the data" + BEST
MIXED = "how the samples lie in its rows cannot be told" + BEST
COMPILED = "the whole model is compiled, and nothing can be followed through it"
CHANCE = "the samples could not be followed, and another axis is as long as the batch; say batch_dim={its module: dim}"


class CannotFollow(Exception):  # noqa: N818 - it is no error, it is an answer
    """Why this model's batch axis cannot be followed."""


@dataclass(frozen=True)
class Where:
    """Along `axis` lie [outer, B, inner]: one, the other or both may be 1. doubt: why there is no such axis."""

    axis: int | None
    outer: int = 1
    inner: int = 1
    doubt: str | None = None

    def rows(self, length: int, samples: int) -> tuple[int, int] | None:
        """(outer, inner) of an axis of this length; None where they do not fit."""
        outer, inner = self.outer, self.inner
        if outer == REST:
            outer = length // max(1, samples * inner) if samples else 1
        elif inner == REST:
            inner = length // max(1, samples * outer) if samples else 1
        return (outer, inner) if outer * samples * inner == length else None


# of every layer that was called, and the embeddings that are positions
Found = tuple[list[tuple[Key, Where]], frozenset[str]]


class BatchAxis:
    """What is known of one model: it may be shared by all recorders of copies of it."""

    def __init__(self, axis: int | None) -> None:
        self.axis = axis  # of the samples in what the model is called on
        self.failure: str | None = "it was not called yet"
        self.input: str | None = None  # the name of the tensor that they are counted in
        self.square = False  # whether an input of the last pass had two axes in front as long as the batch
        self.positions: frozenset[str] = frozenset()  # embeddings whose ids are the same for all samples, and added
        self._known: dict[Key, set[Where]] = {}
        self._followed: list[Any] = []  # kinds of input
        self._missing = False

    @property
    def followed(self) -> bool:
        return self.failure is None

    def is_new(self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int | None) -> bool:
        """Before a forward: whether its inputs are of a kind that has to be followed."""
        if self.axis is None or batch is None:
            return False
        self.square = any(one.shape[:2].count(batch) > 1 for one in tensors_in((args, kwargs)))
        kind = (kind_of((args, kwargs), self.axis, batch), root.training)
        if len(self._followed) >= MOST or (kind in self._followed and not self._missing):
            return False
        self.input = input_name(root, args, kwargs, self.axis)
        self._followed.append(kind)
        self._missing = False
        return True

    def learn(self, follow: Callable[[int], Found]) -> None:
        """What `follow` finds, given the axis of the model's inputs."""
        assert self.axis is not None
        try:
            notes, positions = follow(self.axis)
        except CannotFollow as error:
            self.give_up(str(error))
            return
        self.positions = positions if not self._known else self.positions & positions
        self.failure = None
        for key, where in notes:
            self._known.setdefault(key, set()).add(where)

    def give_up(self, why: str) -> None:
        """Nothing can be followed; what is known stays known."""
        if not self._known:
            self.failure = why

    def find(self, name: str, part: str, dims: int, embeds: bool = False) -> Where | None:
        """Where the samples lie in what a layer puts out; None: nothing was followed, so it has to be measured."""
        if not self.followed:
            return None
        known = self._known.get((name, part, dims))
        if known is None:
            self._missing = True
            return Where(None, doubt=NOT_MET)
        # rows in front or behind may be none, where a sequence has one element
        longer = {one for one in known if one.doubt is not None or (one.outer, one.inner) != (1, 1)}
        if len(longer or known) > 1 or len({one.axis for one in known}) > 1:
            return Where(None, doubt=SEVERAL)
        (where,) = longer or known
        return Where(None, doubt=POSITIONS) if embeds and where.doubt == NOWHERE else where

    def chance(self, output: Tensor, samples: int | None) -> str | None:
        """Why an axis that is as long as the batch cannot be believed; one sample is all that there is, any way."""
        as_long = [size for size in output.shape[:-1] if size == samples]
        if samples == 1 or not (self.square or len(as_long) > 1):
            return None
        return CHANCE

    def describe(self, samples: int | None) -> str:
        """For the report: how many samples the last pass had and where they were looked for."""
        if self.axis is None:
            return "samples: batch_dim says that the model's input has no axis of them"
        named = f" `{self.input}`" if self.input else ""
        count = "not known yet" if samples is None else samples
        said = f"samples: {count}, axis {self.axis} of the first input{named}"
        if self.followed:
            return said
        return f"{said}; in layers the axes that are as long, since they could not be followed: {self.failure}"


def kind_of(given: Any, axis: int, batch: int) -> Any:
    """What may decide which way a forward takes: shapes but for the batch's size, and what is no tensor."""
    if isinstance(given, Tensor):
        shape = tuple(given.shape)
        batched = len(shape) > axis and shape[axis] == batch
        return (given.dtype, (*shape[:axis], None, *shape[axis + 1 :]) if batched else shape)
    if isinstance(given, Mapping):
        return tuple((key, kind_of(value, axis, batch)) for key, value in given.items())
    if isinstance(given, list | tuple):
        return tuple(kind_of(value, axis, batch) for value in given)
    if is_dataclass(given) and not isinstance(given, type):
        return kind_of(vars(given), axis, batch)
    return given if given is None or isinstance(given, bool | int | str) else type(given)


def input_name(root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int = 0) -> str | None:
    """The name of the first argument that holds a tensor with such an axis."""
    for place, value in enumerate(args):
        if first_tensor(value, axis) is not None:
            names = list(inspect.signature(type(inner_of(root)).forward).parameters)[1:]
            return names[place] if place < len(names) else None
    return next((key for key, value in kwargs.items() if first_tensor(value, axis) is not None), None)


def batch_size(given: Any, axis: int | None) -> int | None:
    """The size of that axis of the first tensor that has it, among nested arguments; None where there is none."""
    tensor = None if axis is None else first_tensor(given, axis)
    return None if tensor is None or axis is None else tensor.shape[axis]


def token_count(given: Any) -> int | None:
    """T where the model is called on token ids [B, T, ..]; None otherwise."""
    tensor = first_tensor(given)
    if tensor is None or tensor.ndim < 2 or tensor.is_floating_point() or tensor.is_complex():
        return None
    return None if tensor.dtype == torch.bool else tensor.shape[1]


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors among nested arguments or outputs."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for item in given:
            yield from tensors_in(item)
    elif is_dataclass(given) and not isinstance(given, type):
        yield from tensors_in(list(vars(given).values()))


def first_tensor(given: Any, axis: int = 0) -> Tensor | None:
    """The first that has such an axis: a number is no batch."""
    return next((one for one in tensors_in(given) if one.ndim > axis), None)

"""Step 1, moments: one call of one layer, that is which pass, how many samples, along which axis."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = nullcontext()


def quietly(device: torch.device) -> AbstractContextManager[object]:
    """Without gradients and autocast. Both are off already in nearly every backward, and switching takes 15 us."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type):
        return NOTHING
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


class Doubt(Exception):  # noqa: N818 - it is no error, it is an answer
    """No exact moment for this use; the message says why, and the parameter is estimated instead."""


class Mismatch(Doubt):
    """The sample axis has not the batch's length: where it fits another time, that is chance."""


class Pass(NamedTuple):
    """One forward pass of the root; tokens: T where it was called on token ids [B, T]."""

    number: int
    batch: int | None
    tokens: int | None = None
    doubt: str | None = None


@dataclass(slots=True)
class Site:
    """One call: its forward pass, its samples, where they lie, and the parameters that want a gradient.

    Along `axis` of the output lie [outer, samples, inner] rows. Formulas see a batch of rows; what they find is folded.
    """

    passed: int
    samples: int | None
    axis: int | None
    training: bool
    wanted: frozenset[str]
    compiled: bool = False
    doubt: str | None = None
    recomputed: bool = False  # by a reentrant checkpoint, inside backward
    outer: int = 1
    inner: int = 1

    @property
    def batch(self) -> int | None:
        """How many rows there are."""
        return None if self.samples is None else self.outer * self.samples * self.inner

    @property
    def folds(self) -> bool:
        """Whether a sample has several rows."""
        return self.outer * self.inner != 1

    def samples_first(self, tensor: Tensor, features: int = 0) -> Tensor:
        """[.., B, .., *features] -> [B, .., *features]; doubts when that axis is not B long."""
        if self.doubt is not None:
            raise Doubt(self.doubt)
        if self.axis is None:
            raise Doubt("batch_dim says that it has no sample axis")
        if self.batch is None:
            raise Doubt("the batch size is unknown: no tensor with a batch axis was given to the model's forward")
        if tensor.ndim - features <= self.axis:
            raise Doubt(f"a tensor of shape {tuple(tensor.shape)} has no sample axis {self.axis}")
        if tensor.shape[self.axis] != self.batch:
            raise Mismatch(f"axis {self.axis} is {tensor.shape[self.axis]} long, the batch is {self.batch}")
        return tensor if self.axis == 0 else tensor.movedim(self.axis, 0)

    def positions(self, tensor: Tensor) -> Tensor:
        """[.., B, .., F] -> [B, T, F], T = product of all other axes."""
        moved = self.samples_first(tensor, features=1)
        if moved.ndim == 3:
            return moved
        return moved.reshape(moved.shape[0], prod(moved.shape[1:-1]), moved.shape[-1])

    def sums(self, tensor: Tensor, features: int) -> Tensor:
        """[.., B, .., *features] -> [B, *features], summed over everything between."""
        moved = self.samples_first(tensor, features)
        between = tuple(range(1, moved.ndim - features))
        return moved.sum(dim=between) if between else moved

"""Step 1, moments: one use of a parameter, and how the squares of its samples' contributions add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.precision import norm, wide


class Doubt(Exception):  # noqa: N818 - it is no error, it is an answer
    """No exact moment for this use; the message says why, and the parameter is estimated instead."""


class Mismatch(Doubt):
    """The sample axis has not the batch's length: where it fits another time, that is chance."""


def common_kind(uses: Iterable[Use]) -> str:
    """Exact where all of them are."""
    return next((use.kind for use in uses if use.kind != "exact"), "exact")


def rows_of_samples(tensor: Tensor, outer: int, samples: int, inner: int) -> Tensor:
    """[outer * B * inner, ..] -> [B, outer * inner, ..]."""
    return tensor.reshape(outer, samples, inner, *tensor.shape[1:]).movedim(1, 0).flatten(1, 2)


class Use(ABC):
    """One use of a parameter in one pass: c_b, b < samples, in the parameter's shape."""

    samples: int
    kind: str = "exact"
    summed: Tensor | None = None  # total(), where accumulate came by it
    dtypes: tuple[torch.dtype, ...] = ()  # of the tensors it was made of
    output_gradients: tuple[Tensor, ...] = ()  # of the layers, or only their norms
    finished: Tensor | None = None  # sum_b c_b^2, where the layer's backward came by it
    is_returned: Callable[[Tensor], bool] | None = None  # tells the gradient that the layer's backward returned
    place: Tensor | None = None  # where the moment may be written at once, in the parameter's shape and memory order
    proven: bool = False  # it was shown to add up to its gradient when its graph was captured

    @abstractmethod
    def sample(self, index: int) -> Tensor:
        """c_b of one sample."""

    @abstractmethod
    def total(self) -> Tensor:
        """sum_b c_b: the gradient itself."""

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """total(), to be the parameter's gradient; finishes the moment on the way where that costs less than later."""
        return self.total().to(dtype)

    def accumulate(self, out: Tensor) -> None:
        """out += sum_b c_b^2."""
        if self.finished is None:
            self._accumulate(out)
        else:
            out += self.finished

    def write(self, out: Tensor) -> None:
        """out = sum_b c_b^2, which may be there already."""
        if self.finished is None:
            self._write(out)
        elif self.finished.data_ptr() != out.data_ptr():
            out.copy_(self.finished)

    def _accumulate(self, out: Tensor) -> None:
        """Sample by sample, with buffers of one weight's size."""
        self.summed = torch.zeros_like(out)
        for index in range(self.samples):
            contribution = self.sample(index)
            out.addcmul_(contribution, contribution)
            self.summed += contribution

    def _write(self, out: Tensor) -> None:
        self._accumulate(out.zero_())

    def along(self, probe: Tensor | None) -> Tensor:
        """total(), as a matrix, times the probe; after accumulate this costs far less than the total."""
        total = self.total() if self.summed is None else self.summed
        return total if probe is None else total.reshape(-1, probe.numel()) @ probe.to(total.dtype)

    def noise(self) -> float:
        """The size of the terms that the total is a sum of: times eps, the rounding in it, however small it is."""
        return sum(float(norm(gradient)) for gradient in self.output_gradients)

    def folded(self, outer: int, samples: int, inner: int) -> Use:
        """Of [outer, samples, inner] rows, which were taken for samples, as one of the samples."""
        raise Doubt("a sample has several rows here, which this layer's formula does not follow")

    @staticmethod
    def join(uses: Sequence[Any]) -> Use | None:
        """Several of this class on the same samples as one; None: sample by sample is the best."""
        return None

    def join_other(self, other: Use) -> Use | None:
        """This use and one of another class on the same samples, as one; None: sample by sample is the best."""
        return None


@dataclass
class Direct(Use):
    """c_b given: contributions [B, *shape] (a bias, a scale, a broadcast parameter)."""

    contributions: Tensor
    kind: str = "exact"

    def __post_init__(self) -> None:
        self.samples = self.contributions.shape[0]
        self.contributions = wide(self.contributions)

    def sample(self, index: int) -> Tensor:
        return self.contributions[index]

    def total(self) -> Tensor:
        return self.contributions.sum(0) if self.summed is None else self.summed

    def _accumulate(self, out: Tensor) -> None:
        out += self.contributions.square().sum(0)

    def _write(self, out: Tensor) -> None:
        torch.sum(self.contributions.square(), 0, out=out)

    def folded(self, outer: int, samples: int, inner: int) -> Direct:
        return Direct(rows_of_samples(self.contributions, outer, samples, inner).sum(1), self.kind)

    @staticmethod
    def join(uses: Sequence[Any]) -> Use:
        return Direct(torch.stack([use.contributions for use in uses]).sum(0), common_kind(uses))

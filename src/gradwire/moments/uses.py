"""Step 1, moments: one use of a parameter, and how the squares of its samples' contributions add up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradwire.moments.site import Doubt
from gradwire.moments.together import LINEARS, Problem, choose, chunk_of, exact_dtype, wide_products


class Landed:
    """Whether what is in `.grad` is the very gradient that a layer's backward returned, and nobody wrote to it since.

    Sound where it says yes, but for a write through `.data`: the storage is held weakly, so its address is not used
    again. A reference to the gradient itself would make AccumulateGrad copy it.
    """

    def __init__(self, gradient: Tensor) -> None:
        self.storage: Any = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = gradient._version

    def __call__(self, held: Tensor) -> bool:
        if held.layout != torch.strided:
            return False
        return held._version == self.version and held.untyped_storage()._cdata == self.storage.cdata


def norm(tensor: Tensor) -> Tensor:
    """In float32 at least: a half's square underflows. A norm's norm is itself."""
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=exact_dtype(tensor))
    return found


def rows_of_samples(tensor: Tensor, outer: int, samples: int, inner: int) -> Tensor:
    """[outer * B * inner, ..] -> [B, outer * inner, ..]."""
    return tensor.reshape(outer, samples, inner, *tensor.shape[1:]).movedim(1, 0).flatten(1, 2)


class Use(ABC):
    """One use of a parameter in one pass: c_b, b < samples, in the parameter's shape."""

    samples: int
    kind: str = "exact"
    summed: Tensor | None = None  # total(), where accumulate came by it
    eps: float = 0.0  # of the coarsest tensor it was made of
    output_gradients: tuple[Tensor, ...] = ()  # of the layers, or only their norms
    finished: Tensor | None = None  # sum_b c_b^2, where the layer's backward came by it
    landed: Landed | None = None  # tells the gradient that the layer's backward returned
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
        """out += sum_b c_b^2, with buffers of one weight's size."""
        self.summed = torch.zeros_like(out)
        for index in range(self.samples):
            contribution = self.sample(index)
            out.addcmul_(contribution, contribution)
            self.summed += contribution

    def write(self, out: Tensor) -> None:
        """out = sum_b c_b^2."""
        self.accumulate(out.zero_())

    def hand_over(self, out: Tensor) -> None:
        """out = what was finished, which may be there already."""
        if self.finished is not None and self.finished.data_ptr() != out.data_ptr():
            out.copy_(self.finished)

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

    def join(self, others: Sequence[Use]) -> Use | None:
        """This use and others of its own class on the same samples, as one; None: sample by sample is the best."""
        return None


@dataclass
class Positions(Use):
    """c_b = left_b^T right_b, left [B, T, R], right [B, T, C]: a matrix used at T positions."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        self.samples = self.left.shape[0]
        self.dtype = exact_dtype(self.left)

    def sample(self, index: int) -> Tensor:
        return self.left[index].to(self.dtype).T @ self.right[index].to(self.dtype)

    def total(self) -> Tensor:
        return self.left.to(self.dtype).flatten(0, 1).T @ self.right.to(self.dtype).flatten(0, 1)

    def along(self, probe: Tensor | None) -> Tensor:
        if probe is None or self.summed is not None:
            return super().along(probe)
        left, right = (side.to(self.dtype).flatten(0, 1) for side in (self.left, self.right))
        return left.T @ (right @ probe.to(self.dtype))

    def noise(self) -> float:
        rows = self.left.shape[0] * self.left.shape[1]
        left, right = (float(side.to(self.dtype).norm()) for side in (self.left, self.right))
        return left * right / math.sqrt(max(1, rows))

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """T = 1: torch's own product, since the moment is one more GEMM, and later goes straight where it belongs."""
        left, right = self.left, self.right
        if left.shape[1] == 1 and left.dtype == right.dtype:
            return (left[:, 0].T @ right[:, 0]).to(dtype)
        shape = torch.Size((left.shape[2], right.shape[2]))
        together = choose(LINEARS, Problem(left.device, left.dtype, left.shape[0], left.shape[1], shape))
        if together is None:
            return self.total().to(dtype)
        total, self.finished = together(left, right, dtype, self.place)
        return total

    def accumulate(self, out: Tensor) -> None:
        """T = 1: (left*left)^T (right*right), one GEMM; otherwise sample by sample."""
        if self.finished is not None:
            out += self.finished
            return
        if self.left.shape[1] == 1:
            left, right = (side[:, 0].to(self.dtype).square() for side in (self.left, self.right))
            out.addmm_(left.T, right)
            return
        chunk = chunk_of(self.samples, out.numel(), self.samples)
        if chunk == 1:
            super().accumulate(out)
            return
        for left, right in zip(torch.split(self.left, chunk), torch.split(self.right, chunk), strict=True):
            out += wide_products(left, right, self.dtype).square_().sum(0)

    def write(self, out: Tensor) -> None:
        """One GEMM needs no zeros to begin with."""
        if self.finished is not None:
            self.hand_over(out)
        elif self.left.shape[1] == 1 and self.samples:
            left, right = (side[:, 0].to(self.dtype).square() for side in (self.left, self.right))
            torch.addmm(out, left.T, right, beta=0, out=out)
        else:
            super().write(out)

    def folded(self, outer: int, samples: int, inner: int) -> Positions:
        """The rows are positions too."""
        left, right = (rows_of_samples(side, outer, samples, inner).flatten(1, 2) for side in (self.left, self.right))
        return Positions(left, right)

    def join(self, others: Sequence[Use]) -> Use:
        """Concatenated along T: (sum of uses)^2 with all cross terms."""
        uses = [self, *(other for other in others if isinstance(other, Positions))]
        return Positions(torch.cat([use.left for use in uses], 1), torch.cat([use.right for use in uses], 1))


@dataclass
class Direct(Use):
    """c_b given: contributions [B, *shape] (a bias, a scale, a broadcast parameter)."""

    contributions: Tensor
    kind: str = "exact"

    def __post_init__(self) -> None:
        self.samples = self.contributions.shape[0]
        self.contributions = self.contributions.to(exact_dtype(self.contributions))

    def sample(self, index: int) -> Tensor:
        return self.contributions[index]

    def total(self) -> Tensor:
        return self.contributions.sum(0) if self.summed is None else self.summed

    def accumulate(self, out: Tensor) -> None:
        out += self.contributions.square().sum(0) if self.finished is None else self.finished

    def write(self, out: Tensor) -> None:
        if self.finished is None:
            torch.sum(self.contributions.square(), 0, out=out)
        else:
            self.hand_over(out)

    def folded(self, outer: int, samples: int, inner: int) -> Direct:
        return Direct(rows_of_samples(self.contributions, outer, samples, inner).sum(1), self.kind)

    def join(self, others: Sequence[Use]) -> Use:
        uses = [self, *(other for other in others if isinstance(other, Direct))]
        kind = next((use.kind for use in uses if use.kind != "exact"), "exact")
        return Direct(torch.stack([use.contributions for use in uses]).sum(0), kind)


def by_row(values: Tensor, ids: Tensor, rows: int) -> Tensor:
    """[rows, D]: the sum of the values [N, D] of each id, as an embedding's backward makes it: always in one order.

    `index_add_` on a GPU adds in any order, and a resumed run must have the same bits.
    """
    return torch.ops.aten.embedding_dense_backward(values, ids, rows, -1, False)  # type: ignore[no-any-return]


@dataclass
class Rows(Use):
    """c_b[row] = sum of the values n with owner[n] = b and ids[n] = row; owner, ids [N], values [N, D]."""

    owner: Tensor
    ids: Tensor
    values: Tensor
    samples: int
    rows: int
    regular: bool = False  # every sample has as many entries, one sample after another

    def __post_init__(self) -> None:
        self.values = self.values.to(exact_dtype(self.values))

    def sample(self, index: int) -> Tensor:
        mine = self.owner == index
        return by_row(self.values[mine], self.ids[mine], self.rows)

    def total(self) -> Tensor:
        return by_row(self.values, self.ids, self.rows)

    def along(self, probe: Tensor | None) -> Tensor:
        if probe is None:
            return super().along(probe)
        return self.values.new_zeros(self.rows).index_add_(0, self.ids, self.values @ probe.to(self.values.dtype))

    def accumulate(self, out: Tensor) -> None:
        """Segment sums over (sample, row), squared: never B x rows x D, and nobody waits for how many there are."""
        n_values = self.ids.numel()
        ordered, order = torch.sort(self.owner * self.rows + self.ids)
        begins = torch.ones_like(ordered)
        begins[1:] = ordered[1:] != ordered[:-1]
        segment = torch.empty_like(ordered).scatter_(0, order, begins.cumsum(0) - 1)
        row = torch.zeros_like(ordered).scatter_(0, segment, self.ids)  # a segment that is not there adds 0 to row 0
        sums = by_row(self.values, segment, n_values)
        out += by_row(sums.square_(), row, self.rows)

    def folded(self, outer: int, samples: int, inner: int) -> Rows:
        owner = self.owner // inner % max(1, samples)
        return Rows(owner, self.ids, self.values, samples, self.rows, self.regular and outer == 1)

    def join(self, others: Sequence[Use]) -> Use:
        uses = [self, *(other for other in others if isinstance(other, Rows))]
        regular = all(use.regular for use in uses) and self.samples > 0

        def joined(name: str) -> Tensor:
            parts = [getattr(use, name) for use in uses]
            if not regular:
                return torch.cat(parts)
            return torch.cat([part.unflatten(0, (self.samples, -1)) for part in parts], 1).flatten(0, 1)

        return Rows(joined("owner"), joined("ids"), joined("values"), self.samples, self.rows, regular)


@dataclass
class Picked(Use):
    """c_b[ids[b, d], d] = values[b, d]: one row for every column (EmbeddingBag, mode max); ids, values [B, D]."""

    ids: Tensor
    values: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.samples = self.ids.shape[0]
        self.values = self.values.to(exact_dtype(self.values))

    def sample(self, index: int) -> Tensor:
        return self._dense(self.ids[index : index + 1], self.values[index : index + 1])

    def total(self) -> Tensor:
        return self._dense(self.ids, self.values)

    def _dense(self, ids: Tensor, values: Tensor) -> Tensor:
        return values.new_zeros(self.rows, values.shape[-1]).scatter_add_(0, ids, values)

    def accumulate(self, out: Tensor) -> None:
        out += self._dense(self.ids, self.values.square())

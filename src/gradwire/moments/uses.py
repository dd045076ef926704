"""Step 1, moments: one use of a parameter, and how the squares of its samples' contributions add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.moments.site import Doubt

# Samples are taken together while their gradients fit in so many elements, and never more than half of them: with tiny
# weights a loop over single samples costs more in calls than in arithmetic. So nothing has batch x weights elements.
WORKSPACE = 1 << 16


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything else is squared and summed in float32 (float16 squares underflow)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Use(ABC):
    """One use of a parameter in one pass: c_b, b < samples, in the parameter's shape."""

    samples: int
    kind: str = "exact"

    @abstractmethod
    def sample(self, index: int) -> Tensor:
        """c_b of one sample."""

    @abstractmethod
    def total(self) -> Tensor:
        """sum_b c_b: the gradient itself."""

    def accumulate(self, out: Tensor) -> None:
        """out += sum_b c_b^2, with one buffer of one weight's size."""
        for index in range(self.samples):
            contribution = self.sample(index)
            out.addcmul_(contribution, contribution)

    def join(self, others: Sequence[Use]) -> Use:
        """This use and others of its own class on the same samples, as one."""
        return Together([self, *others])


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

    def accumulate(self, out: Tensor) -> None:
        """T = 1: (left*left)^T (right*right), one GEMM; otherwise sample by sample."""
        if self.left.shape[1] == 1:
            left, right = (side[:, 0].to(self.dtype).square() for side in (self.left, self.right))
            out.addmm_(left.T, right)
            return
        chunk = max(1, min(WORKSPACE // max(1, out.numel()), self.samples // 2))
        if chunk == 1:
            super().accumulate(out)
            return
        for left, right in zip(torch.split(self.left, chunk), torch.split(self.right, chunk), strict=True):
            out += (left.to(self.dtype).transpose(1, 2) @ right.to(self.dtype)).square_().sum(0)

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
        return self.contributions.sum(0)

    def accumulate(self, out: Tensor) -> None:
        out += self.contributions.square().sum(0)

    def join(self, others: Sequence[Use]) -> Use:
        uses = [self, *(other for other in others if isinstance(other, Direct))]
        kind = next((use.kind for use in uses if use.kind != "exact"), "exact")
        return Direct(torch.stack([use.contributions for use in uses]).sum(0), kind)


@dataclass
class Rows(Use):
    """c_b[row] = sum of the values n with owner[n] = b and ids[n] = row; owner, ids [N], values [N, D]."""

    owner: Tensor
    ids: Tensor
    values: Tensor
    samples: int
    rows: int

    def __post_init__(self) -> None:
        self.values = self.values.to(exact_dtype(self.values))

    def sample(self, index: int) -> Tensor:
        mine = self.owner == index
        return self._dense(self.ids[mine], self.values[mine])

    def total(self) -> Tensor:
        return self._dense(self.ids, self.values)

    def _dense(self, ids: Tensor, values: Tensor) -> Tensor:
        return values.new_zeros(self.rows, values.shape[-1]).index_add_(0, ids, values)

    def accumulate(self, out: Tensor) -> None:
        """Segment sums over (sample, row), at most N of them, squared: never B x rows x D."""
        segments, place = torch.unique(self.owner * self.rows + self.ids, return_inverse=True)
        sums = self.values.new_zeros(segments.numel(), self.values.shape[-1]).index_add_(0, place, self.values)
        out.index_add_(0, segments % self.rows, sums.square_())

    def join(self, others: Sequence[Use]) -> Use:
        uses = [self, *(other for other in others if isinstance(other, Rows))]
        owner, ids, values = (torch.cat([getattr(use, name) for use in uses]) for name in ("owner", "ids", "values"))
        return Rows(owner, ids, values, self.samples, self.rows)


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


@dataclass
class Slice(Use):
    """A use of the rows start : start + length only (a third of MultiheadAttention's in_proj)."""

    inner: Use
    start: int
    length: int
    shape: torch.Size

    def __post_init__(self) -> None:
        self.samples = self.inner.samples

    def _padded(self, part: Tensor) -> Tensor:
        whole = part.new_zeros(self.shape)
        whole[self.start : self.start + self.length] = part
        return whole

    def sample(self, index: int) -> Tensor:
        return self._padded(self.inner.sample(index))

    def total(self) -> Tensor:
        return self._padded(self.inner.total())

    def accumulate(self, out: Tensor) -> None:
        self.inner.accumulate(out[self.start : self.start + self.length])

    def join(self, others: Sequence[Use]) -> Use:
        """Uses of the same rows become one; uses of disjoint rows have no cross terms."""
        groups: dict[tuple[int, int], list[Use]] = {}
        for use in (self, *others):
            assert isinstance(use, Slice)
            groups.setdefault((use.start, use.length), []).append(use.inner)
        ends = sorted((start, start + length) for start, length in groups)
        if any(end > start for (_, end), (start, _) in pairwise(ends)):
            return Together([self, *others])
        return Disjoint([Slice(merge(inner), *place, self.shape) for place, inner in groups.items()])


class Together(Use):
    """Uses of any classes on the same samples: c_b = sum of theirs, sample by sample (a tied embedding)."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = list(uses)
        self.samples = self.uses[0].samples
        self.kind = next((use.kind for use in uses if use.kind != "exact"), "exact")

    def sample(self, index: int) -> Tensor:
        # not in place: a Direct's sample is a view of what it keeps
        return torch.stack([use.sample(index) for use in self.uses]).sum(0)

    def total(self) -> Tensor:
        return torch.stack([use.total() for use in self.uses]).sum(0)


class Disjoint(Together):
    """Uses of disjoint elements: without cross terms, so each adds up its own squares."""

    def accumulate(self, out: Tensor) -> None:
        for use in self.uses:
            use.accumulate(out)


@dataclass
class Settled(Use):
    """A use finished at once: under torch.compile the buffers it was made of are used again."""

    moment: Tensor
    samples: int
    kind: str = "exact"

    def sample(self, index: int) -> Tensor:
        raise Doubt("it was used a second time in a compiled graph, which no earlier backward had shown")

    def total(self) -> Tensor:
        return self.sample(0)

    def accumulate(self, out: Tensor) -> None:
        out += self.moment


def merge(uses: Sequence[Use]) -> Use:
    """All uses of a parameter in one pass as one use: the same samples, so cross terms count."""
    first = uses[0]
    if len(uses) == 1:
        return first
    if any(use.samples != first.samples for use in uses):
        raise Doubt(f"it was used on {first.samples} and on {uses[-1].samples} samples in one forward pass")
    if any(isinstance(use, Settled) for use in uses):
        first = next(use for use in uses if isinstance(use, Settled))
        first.sample(0)
    if all(type(use) is type(first) for use in uses):
        return first.join(uses[1:])
    return Together(uses)

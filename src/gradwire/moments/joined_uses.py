"""Step 1, moments: uses made of other uses: a part of the rows, several uses in one pass, one finished early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradwire.moments.uses import Doubt, Use, common_kind


@dataclass
class Slice(Use):
    """A use of the rows start : start + length only (a third of MultiheadAttention's in_proj)."""

    inner: Use
    start: int
    length: int
    rows: int  # of the parameter

    def __post_init__(self) -> None:
        self.samples = self.inner.samples

    def _padded(self, part: Tensor) -> Tensor:
        whole = part.new_zeros(self.rows, *part.shape[1:])
        whole[self.start : self.start + self.length] = part
        return whole

    def sample(self, index: int) -> Tensor:
        return self._padded(self.inner.sample(index))

    def total(self) -> Tensor:
        return self._padded(self.inner.total())

    def along(self, probe: Tensor | None) -> Tensor:
        return self._padded(self.inner.along(probe))

    def noise(self) -> float:
        return self.inner.noise() or super().noise()

    def _accumulate(self, out: Tensor) -> None:
        self.inner.accumulate(out[self.start : self.start + self.length])

    def folded(self, outer: int, samples: int, inner: int) -> Slice:
        return replace(self, inner=self.inner.folded(outer, samples, inner))

    @staticmethod
    def join(uses: Sequence[Any]) -> Use | None:
        """Uses of the same rows become one; uses of disjoint rows have no cross terms."""
        groups: dict[tuple[int, int], list[Use]] = {}
        for use in uses:
            groups.setdefault((use.start, use.length), []).append(use.inner)
        ends = sorted((start, start + length) for start, length in groups)
        if any(end > start for (_, end), (start, _) in pairwise(ends)):
            return None
        return Disjoint([Slice(merge(inner), *place, uses[0].rows) for place, inner in groups.items()])


class Summed(Use):
    """Uses of any classes on the same samples: c_b = sum of theirs, sample by sample (a tied embedding)."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = list(uses)
        self.samples = self.uses[0].samples
        self.kind = common_kind(uses)

    def sample(self, index: int) -> Tensor:
        # not in place: a Direct's sample is a view of what it keeps
        return torch.stack([use.sample(index) for use in self.uses]).sum(0)

    def total(self) -> Tensor:
        return torch.stack([use.total() for use in self.uses]).sum(0)

    def noise(self) -> float:
        return sum(use.noise() for use in self.uses)


class Disjoint(Summed):
    """Uses of disjoint elements, or on different samples: no cross terms, so each adds up its own squares."""

    def _accumulate(self, out: Tensor) -> None:
        for use in self.uses:
            use.accumulate(out)

    def along(self, probe: Tensor | None) -> Tensor:
        return torch.stack([use.along(probe) for use in self.uses]).sum(0)


class Settled(Use):
    """A use finished at once: the buffers it was made of are used again by a compiled or captured graph."""

    finished: Tensor
    probed: Tensor | None = None

    def __init__(self, use: Use, like: Tensor, dtype: torch.dtype) -> None:
        """like: the parameter."""
        self.samples, self.kind, self.dtypes, self.place = use.samples, use.kind, use.dtypes, use.place
        self.is_returned = use.is_returned
        if use.finished is None:
            self.finished = torch.empty_like(like, dtype=dtype)
            use.write(self.finished)
        else:
            self.finished = use.finished

    def along(self, probe: Tensor | None) -> Tensor:
        return self.total() if self.probed is None else self.probed

    def total(self) -> Tensor:
        raise Doubt("it was used a second time in a compiled graph, which no earlier backward had shown")

    def sample(self, index: int) -> Tensor:
        return self.total()


def merge(uses: Sequence[Use]) -> Use:
    """All uses of a parameter on the same samples as one use: cross terms count."""
    first = uses[0]
    if len(uses) == 1:
        return first
    if any(use.samples != first.samples for use in uses):
        raise Doubt(f"it was used on {first.samples} and on {uses[-1].samples} samples in one forward pass")
    of_class: dict[type[Use], list[Use]] = {}
    for use in uses:
        if isinstance(use, Settled):
            use.total()  # which doubts
        of_class.setdefault(type(use), []).append(use)
    parts: list[Use] = []
    for alike in of_class.values():
        one = alike[0].join(alike) if len(alike) > 1 else alike[0]
        parts += alike if one is None else [one]
    joined = parts[0] if len(parts) == 1 else _pair(parts) or Summed(parts)
    joined.output_gradients = tuple(gradient for use in uses for gradient in use.output_gradients)
    joined.dtypes = tuple(dtype for use in uses for dtype in use.dtypes)
    return joined


def _pair(parts: Sequence[Use]) -> Use | None:
    """Two uses of different classes as one where one of them knows how."""
    return parts[0].join_other(parts[1]) or parts[1].join_other(parts[0]) if len(parts) == 2 else None


def by_samples(passes: Mapping[int, list[Use]], same_samples: bool) -> list[list[Use]]:
    """The uses of one backward, those on the same samples together.

    For the loss, passes with as many samples are of the same ones (a Siamese net's two), or of pairs that come
    together (a discriminator's real and false ones), whose contributions add up before they are squared.
    """
    if not same_samples:
        return list(passes.values())
    together: dict[int, list[Use]] = {}
    for uses in passes.values():
        together.setdefault(uses[0].samples, []).extend(uses)
    return list(together.values())

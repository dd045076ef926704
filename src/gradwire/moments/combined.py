"""Step 1, moments: uses made of other uses: a part of the rows, several uses in one pass, one finished early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.moments.site import Doubt
from gradwire.moments.together import wide_products
from gradwire.moments.uses import Positions, Rows, Use, by_row


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

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Of the rows alone."""
        return self.inner.gradient(dtype)

    def along(self, probe: Tensor | None) -> Tensor:
        part = self.inner.along(probe)
        whole = part.new_zeros(self.shape[0])
        whole[self.start : self.start + self.length] = part
        return whole

    def noise(self) -> float:
        return self.inner.noise() or super().noise()

    def accumulate(self, out: Tensor) -> None:
        self.inner.accumulate(out[self.start : self.start + self.length])

    def folded(self, outer: int, samples: int, inner: int) -> Slice:
        return Slice(self.inner.folded(outer, samples, inner), self.start, self.length, self.shape)

    def join(self, others: Sequence[Use]) -> Use | None:
        """Uses of the same rows become one; uses of disjoint rows have no cross terms."""
        groups: dict[tuple[int, int], list[Use]] = {}
        for use in (self, *others):
            assert isinstance(use, Slice)
            groups.setdefault((use.start, use.length), []).append(use.inner)
        ends = sorted((start, start + length) for start, length in groups)
        if any(end > start for (_, end), (start, _) in pairwise(ends)):
            return None
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

    def noise(self) -> float:
        return sum(use.noise() for use in self.uses)


class Disjoint(Together):
    """Uses of disjoint elements, or on different samples: no cross terms, so each adds up its own squares."""

    def accumulate(self, out: Tensor) -> None:
        for use in self.uses:
            use.accumulate(out)

    def along(self, probe: Tensor | None) -> Tensor:
        return torch.stack([use.along(probe) for use in self.uses]).sum(0)


class HeadAndTable(Disjoint):
    """A matrix that is also a table of rows, an output layer tied to an embedding: c_b = H_b + E_b, [V, D].

        sum_b c_b^2 = sum_b H_b^2 + sum_b E_b^2 + 2 sum_b H_b E_b        H_b = G_b^T X_b

    E_b has a row for each token only, so that of H_b in the last sum those rows suffice: T x T x D products a sample
    and not T x V x D, and never a matrix of the weight's size for each sample.
    """

    def __init__(self, head: Positions, table: Rows) -> None:
        super().__init__([head, table])
        self.head, self.table = head, table

    def accumulate(self, out: Tensor) -> None:
        super().accumulate(out)
        if not self.samples:
            return
        # sample by sample: all of them together would be B x T x T
        pairs = zip(self.table.ids.chunk(self.samples), self.table.values.chunk(self.samples), strict=True)
        crossed = [self._rows(b, ids) * values for b, (ids, values) in enumerate(pairs)]
        out += by_row(torch.cat(crossed).mul_(2), self.table.ids, self.table.rows)

    def _rows(self, sample: int, ids: Tensor) -> Tensor:
        """H_b of the rows that sample b used, [T, D]: one for every token, also for one that came before."""
        columns = self.head.left[sample].index_select(1, ids)
        return wide_products(columns[None], self.head.right[sample][None], self.head.dtype)[0]


def head_and_table(uses: Sequence[Use]) -> HeadAndTable | None:
    """A Positions and a Rows of as many entries for every sample, as one."""
    head = next((use for use in uses if isinstance(use, Positions)), None)
    table = next((use for use in uses if isinstance(use, Rows)), None)
    if len(uses) != 2 or head is None or table is None or not table.regular:
        return None
    return HeadAndTable(head, table) if head.left.shape[2] == table.rows else None


@dataclass
class Settled(Use):
    """A use finished at once: the buffers it was made of are used again by a compiled or captured graph."""

    moment: Tensor
    samples: int
    kind: str = "exact"
    probed: Tensor | None = None

    def along(self, probe: Tensor | None) -> Tensor:
        return self.sample(0) if self.probed is None else self.probed

    def sample(self, index: int) -> Tensor:
        raise Doubt("it was used a second time in a compiled graph, which no earlier backward had shown")

    def total(self) -> Tensor:
        return self.sample(0)

    def accumulate(self, out: Tensor) -> None:
        out += self.moment

    def write(self, out: Tensor) -> None:
        out.copy_(self.moment)


def settled(use: Use, like: Tensor, dtype: torch.dtype) -> Settled:
    """The use finished; like: the parameter."""
    moment = use.finished
    if moment is None:
        moment = torch.empty_like(like, dtype=dtype)
        use.write(moment)
    made = Settled(moment, use.samples, use.kind)
    made.eps = use.eps
    return made


def merge(uses: Sequence[Use]) -> Use:
    """All uses of a parameter on the same samples as one use: cross terms count."""
    first = uses[0]
    if len(uses) == 1:
        return first
    if any(use.samples != first.samples for use in uses):
        raise Doubt(f"it was used on {first.samples} and on {uses[-1].samples} samples in one forward pass")
    if any(isinstance(use, Settled) for use in uses):
        first = next(use for use in uses if isinstance(use, Settled))
        first.sample(0)
    of_kind: dict[type[Use], list[Use]] = {}
    for use in uses:
        of_kind.setdefault(type(use), []).append(use)
    parts = [part for alike in of_kind.values() for part in _joined(alike)]
    joined = parts[0] if len(parts) == 1 else head_and_table(parts) or Together(parts)
    joined.output_gradients = tuple(gradient for use in uses for gradient in use.output_gradients)
    return joined


def _joined(alike: Sequence[Use]) -> Sequence[Use]:
    """Uses of one class as one where that class can."""
    joined = alike[0].join(alike[1:]) if len(alike) > 1 else None
    return alike if joined is None else [joined]


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

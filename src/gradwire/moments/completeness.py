"""Step 1, moments: do a parameter's recorded uses add up to its gradient? A use outside its module would be missed."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod

import torch
from torch import Tensor, nn

from gradwire.moments.uses import Doubt, Use


class Completeness:
    """One parameter's comparison: (sum of uses) r against (gradient after - before) r, r random.

    Two products of a matrix and a vector, where the total itself would cost a weight gradient. `.grad` is asked
    before and after accumulation and no reference is kept: one more would make AccumulateGrad copy.
    """

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self.param, self.dtype = param, dtype
        self.before: Tensor | None = None  # what `.grad` was before, times r
        self._probe: Tensor | None = None

    @property
    def probe(self) -> Tensor | None:
        """r, one value for each column of the parameter as a matrix; None for a vector, which is compared whole."""
        if self.param.ndim < 2:
            return None
        if self._probe is None or self._probe.device != self.param.device:
            drawn = torch.randn(
                prod(self.param.shape[1:]), generator=torch.Generator().manual_seed(1), dtype=self.dtype
            )
            self._probe = drawn.to(self.param.device)
        return self._probe

    def remember(self, held: Tensor) -> None:
        """Before accumulation; held: `.grad`."""
        self.before = self._along(held).clone()

    @torch.no_grad()
    def _along(self, gradient: Tensor) -> Tensor:
        wide = (gradient.to_dense() if gradient.is_sparse else gradient).to(self.dtype)
        return wide if self.probe is None else wide.reshape(-1, self.probe.numel()) @ self.probe

    def compare(self, uses: Sequence[Use], held: Tensor, moment: Tensor) -> bool | None:
        """After accumulation: doubts where the uses do not add up to what came; None: cannot be told; zero: False."""
        before, self.before = self.before, None
        each = [use.along(self.probe) for use in uses]
        found = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        change = self._along(held)
        made_of = [held.dtype, self.dtype, *(dtype for use in uses for dtype in use.dtypes)]
        eps = max(torch.finfo(dtype).eps for dtype in made_of if dtype.is_floating_point)
        slack = 0.0
        if before is not None:
            change = change - before
            slack = 16 * eps * float(before.norm())
        off, size = float((found.reshape(change.shape) - change).norm()), float(change.norm())
        if not isfinite(off):
            return None
        share = max(0.01, 16 * eps)
        if off > share * size + slack:
            # Some gradients are zero but for rounding (a key's bias under softmax): the terms, which are not, tell.
            spread = float(moment.sum().clamp(min=0).sqrt())
            if off > share * (size + spread) + slack + 16 * eps * sum(use.noise() for use in uses):
                raise Doubt(
                    f"its recorded uses explain all but {off / (size + spread):.0%} of its gradient: "
                    "it is also used outside its module; a layer that shares it (head.weight = table.weight) is exact"
                )
        return size > 0

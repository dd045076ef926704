"""Step 1, moments: do a parameter's recorded uses add up to its gradient? A use outside its module would be missed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import isfinite, prod

import torch
from torch import Tensor, nn

from gradwire.moments.site import Doubt
from gradwire.moments.uses import Use

OFTEN = 64  # on a GPU every so many commits, since the answer must be waited for; on a CPU always
THRICE = 3  # mismatches until the parameter is no longer believed at all


def widest(dtypes: Iterable[torch.dtype]) -> float:
    """The coarsest eps among floating point types."""
    return max(map(eps_of, dtypes), default=0.0)


@lru_cache(maxsize=64)
def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


class Check:
    """One parameter's check, commit by commit: (sum of uses) r against (gradient after - before) r, r random.

    Two products of a matrix and a vector, where the total itself would cost a weight gradient. `.grad` is asked
    before and after accumulation and no reference is kept: one more would make AccumulateGrad copy.
    """

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self.param, self.dtype = param, dtype
        self.verified = False  # its uses added up to its gradient the last time
        self.due = False
        self.commits, self.mismatches = 0, 0
        self._probe: Tensor | None = None
        self._before: Tensor | None = None

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

    def ask(self) -> None:
        """A double backward passed through its layer: part of its gradient may come by another way than the tap."""
        self.verified = False

    @property
    def coming(self) -> bool:
        """Whether the next commit is compared."""
        return self.param.numel() > 0 and (not self.verified or not self.param.is_cuda or self.commits % OFTEN == 0)

    def before(self, held: Tensor | None) -> None:
        """Before accumulation; held: `.grad`."""
        self.due = self.coming
        self._before = self._along(held).clone() if self.due and held is not None else None

    @torch.no_grad()
    def _along(self, gradient: Tensor) -> Tensor:
        wide = (gradient.to_dense() if gradient.is_sparse else gradient).to(self.dtype)
        return wide if self.probe is None else wide.reshape(-1, self.probe.numel()) @ self.probe

    @staticmethod
    def _landed(uses: list[Use], held: Tensor) -> bool:
        """`.grad` is what the only use's own backward returned, and untouched: nothing is left to compare.

        Two products of a 512 x 784 weight, its gradient's and its use's, took 1 % of an MLP's step.
        """
        return len(uses) == 1 and uses[0].landed is not None and uses[0].landed(held)

    def after(self, uses: list[Use], held: Tensor, eps: float, moment: Tensor) -> None:
        """After accumulation: doubts where the uses do not add up to what came."""
        self.commits += 1
        before, self._before = self._before, None
        if not self.due:
            return
        self.due = False
        if all(use.proven for use in uses):
            self.verified = True
            return
        if before is None and self.commits % OFTEN and self._landed(uses, held):
            self.verified = True
            return
        each = [use.along(self.probe) for use in uses]
        found = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        change = self._along(held)
        eps = max(eps, widest([held.dtype, self.dtype]))
        slack = 0.0
        if before is not None:
            change = change - before
            slack = 16 * eps * float(before.norm())
        off, size = float((found.reshape(change.shape) - change).norm()), float(change.norm())
        if not isfinite(off):
            return
        share = max(0.01, 16 * eps)
        if off > share * size + slack:
            # Some gradients are zero but for rounding (a key's bias under softmax): the terms, which are not, tell.
            spread = float(moment.sum().clamp(min=0).sqrt())
            if off > share * (size + spread) + slack + 16 * eps * sum(use.noise() for use in uses):
                self.verified = False
                self.mismatches += 1
                raise Doubt(
                    f"its recorded uses explain all but {off / (size + spread):.0%} of its gradient: "
                    "it is also used outside its module; a layer that shares it (head.weight = table.weight) is exact"
                )
        self.verified = size > 0

"""Step 3 where a density is wanted: from which score on an element passes. Plain torch, the same on every device.

r residual, v variance, both with this step's gradient and moment in them; K tensors, of n elements each.

    s = fl(fl(r r) - fl(alpha v))                the score; only s > 0 counts, and |r| >= SMALLEST
    h[s's bits >> 19] += 1                       a histogram for every tensor: sixteen bins a binade
    k = max(1, floor(density n))                 elements of it are wanted
    above <= k < above + h[b]                    above: how many are in the bins higher than b
    limit = ((b + 1) << 19) - ((k - above) << 19) // h[b]
    s passes if its bits >= limit                if there are no more than k: limit = 1, and all of them pass

So about k pass: all of the higher bins and, as if they lay evenly, the upper part of bin b. Nothing is sorted, and what
is here is integers, which no device rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.interface import Rule
from gradwire.codec.quota import Quota, table_of
from gradwire.layout import Layout

SHIFT = 19  # bits of a score below those that are its bin
BINS = 1 << 31 - SHIFT  # the sign of what is counted is 0


def limits(histogram: Tensor, layout: Layout, rule: Rule) -> Tensor:
    """The limits int32 [K] for the scores that are counted in histogram [K, BINS]. Nothing is waited for.

    With a floor they are above floor^2 too. Positive floats are in the order of their bits, and no number has the bits
    of a NaN, so that kernels may compare s with a limit as float32: the same elements pass.
    """
    assert rule.density is not None
    wanted = table_of(Quota.of(layout, rule.density), histogram.device).counts
    within = histogram.cumsum(1, dtype=torch.int64)  # in this bin or a lower one
    rest = within[:, -1:] - wanted[:, None]  # how many are not to pass
    place = torch.searchsorted(within, rest)  # b: the lowest bin in which there are as many, or in a lower one
    need = within.gather(1, place) - rest
    found = histogram.gather(1, place).long().clamp_(min=1)  # no zero, where all pass
    limit = ((place + 1) << SHIFT) - (need << SHIFT) // found
    return torch.where(rest > 0, limit, 1).clamp_(min=_least(rule)).squeeze(1).int()


def _least(rule: Rule) -> int:
    """The bits of the smallest score above floor^2, which is rounded to float32."""
    floor = torch.tensor(rule.floor, dtype=torch.float32)
    return int((floor * floor).view(torch.int32)) + 1

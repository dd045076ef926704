"""Plain torch for steps 2 to 4 and 6: the definition of right, on any device.

r residual, v variance, g gradient, m second moment (sum of c_z^2); k a tensor of the bucket, N elements, K tensors.
Every operation is rounded to float32 by itself and none is fused, so that every device decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.layout import Layout, Slot

CHUNK = 1 << 28  # a word has 28 bits for the place: longer messages are cut into chunks of this many elements
NOTHING = -128  # the exponent of a tensor that sends nothing
SMALLEST = 2.0**-126  # below it float32 is denormal and devices differ: never sent
WINDOW = 7  # three bits of exponent below the tensor's own
ROUNDING = {"paper": 0x00400000, "unbiased": 0x004AFB0D}  # half a binade: 1.5 goes up; or a boundary at sqrt 2


@dataclass(frozen=True)
class Rule:
    """What decides: r^2 > alpha v + floor^2, and with tau also |r| > tau."""

    alpha: float
    zeta: float
    tau: float | None
    floor: float
    feedback: bool
    rounding: str


@dataclass
class Selection:
    """What one encode found: n elements in ascending order of their place, and what they were before."""

    index: Tensor  # int64 [n]
    code: Tensor  # int32 [n], sign << 3 | d
    exponents: Tensor  # int32 [K], e_k or NOTHING
    passed: Tensor  # int32 [K], elements that asked for room; -1 for a tensor without a gradient
    finite: Tensor  # bool [], no bad gradient or moment
    residual: Tensor  # float32 [n], r before the send
    variance: Tensor  # float32 [n], v before the send
    sent_norm: Tensor  # float32 [], |sent|_1


def encode(
    grad: Tensor,
    moment: Tensor,
    residual: Tensor,
    variance: Tensor,
    active: Tensor | None,
    layout: Layout,
    rule: Rule,
    capacity: Sequence[int],
    step: int,
) -> Selection:
    """Accumulate, decide, quantize: changes r and v in place and returns what is to be sent.

    r += g;  v += m;  sent where r^2 > alpha v + floor^2 (r = v = 0 after it), elsewhere v *= zeta.
    `active` [K] bool: tensors without a gradient in this step are left alone; None means all have one.
    `capacity`: how many elements of each tensor fit; the others wait as if they had not passed.
    """
    live = None if active is None else layout.spread(active)
    finite = accumulate(grad, moment, residual, variance, live)
    passes = decide(residual, variance, live, rule)
    exponents, code, passes = quantize(residual, passes, layout, rule)
    index = passes.nonzero().squeeze(1)
    passed = torch.bincount(layout.slot_of(index), minlength=len(layout)).int()
    if active is not None:
        passed = torch.where(active, passed, -1)
    index = fit(residual, index, passed, layout, capacity, step)
    before = Selection(
        index, code[index], exponents, passed, finite, residual[index], variance[index], residual.new_zeros(())
    )
    if live is None:
        variance.mul_(rule.zeta)
    else:
        variance.copy_(torch.where(live, variance * rule.zeta, variance))
    sent = values(before.index, before.code, exponents, layout, rule)
    residual[index], variance[index] = settle(before.residual, before.variance, sent, rule)
    before.sent_norm = sent.abs().sum()
    return before


def accumulate(grad: Tensor, moment: Tensor, residual: Tensor, variance: Tensor, live: Tensor | None) -> Tensor:
    """r += g, v += m where both stay finite; a bad value adds nothing. Returns whether all were good, bool []."""
    new_residual, new_variance = residual + grad, variance + moment
    good = torch.isfinite(new_residual) & torch.isfinite(new_variance)
    if live is None:
        finite = good.all()
    else:
        finite = (good | ~live).all()
        good &= live
    residual.copy_(torch.where(good, new_residual, residual))
    variance.copy_(torch.where(good, new_variance, variance))
    return finite


def decide(residual: Tensor, variance: Tensor, live: Tensor | None, rule: Rule) -> Tensor:
    """The elements that are unambiguous, bool [N]."""
    size = residual.abs()
    threshold = variance * rule.alpha
    if rule.floor:
        floor = torch.tensor(rule.floor, dtype=torch.float32)  # squared in float32, as a kernel does
        threshold = threshold + float(floor * floor)
    passes = (residual * residual > threshold) & (size >= SMALLEST)
    if rule.tau is not None:
        passes &= size > rule.tau
    return passes if live is None else passes & live


def quantize(residual: Tensor, passes: Tensor, layout: Layout, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents [K], codes [N] and the elements that can be sent: d = e_k - log2(rounded |r|) must be in 0..7.

    M_k = max |r| over the passing elements of tensor k;  e_k = floor(log2 M_k)  (unbiased: of M_k rounded).
    """
    size = residual.abs()
    sign = torch.signbit(residual).int() << 3
    if rule.tau is not None:  # the value is tau for every element: sign only
        none = torch.full((len(layout),), NOTHING, dtype=torch.int32, device=residual.device)
        return none, sign, passes
    half = ROUNDING[rule.rounding]
    largest = torch.segment_reduce(
        torch.where(passes, size, 0.0), "max", lengths=layout.lengths(size.device), initial=0
    )
    bits = largest.view(torch.int32) + (half if rule.rounding == "unbiased" else 0)
    top = (bits >> 23).clamp_(max=254)  # biased; 2^127 is the largest power of two
    rounded = (size.view(torch.int32) + half) >> 23
    distance = (layout.spread(top) - rounded).clamp_(min=0)
    exponents = torch.where(largest > 0, top - 127, NOTHING)
    return exponents, sign | (distance & WINDOW), passes & (distance <= WINDOW)


def fit(residual: Tensor, index: Tensor, passed: Tensor, layout: Layout, capacity: Sequence[int], step: int) -> Tensor:
    """The places that fit, ascending; `passed` [K] of them are in each tensor."""
    counts = passed.clamp(min=0).tolist()
    if all(count <= room for count, room in zip(counts, capacity, strict=True)):
        return index
    parts = torch.split(index, counts)
    return torch.cat(
        [_largest(residual, part, slot, room, step) for part, slot, room in zip(parts, layout, capacity, strict=True)]
    )


def _largest(residual: Tensor, index: Tensor, slot: Slot, capacity: int, step: int) -> Tensor:
    """`capacity` places of one tensor: largest binades first, inside the last one from a place that rotates."""
    if len(index) <= capacity:
        return index
    binade = residual[index].abs().view(torch.int32) >> 23
    above = torch.bincount(binade, minlength=256).flip(0).cumsum(0).flip(0)  # elements in this binade or a larger one
    last = int((above > capacity).nonzero().max())  # the binade that does not fit whole
    whole, partial = index[binade > last], index[binade == last]
    start = slot.offset + step * 0x9E3779B1 % slot.numel  # golden ratio: consecutive steps start far apart
    turned = torch.cat([partial[partial >= start], partial[partial < start]])
    return torch.cat([whole, turned[: capacity - len(whole)]]).sort().values


def values(index: Tensor, code: Tensor, exponents: Tensor, layout: Layout, rule: Rule) -> Tensor:
    """What the codes mean: sign * 2^(e_k - d), or sign * tau. float32 [n]."""
    sign = code >> 3
    if rule.tau is not None:
        tau = torch.full(index.shape, rule.tau, dtype=torch.float32, device=index.device)
        return torch.where(sign == 1, -tau, tau)
    exponent = exponents[layout.slot_of(index)] - (code & WINDOW)
    # sign << 31 does not fit a signed word by multiplication, so it is set on the float
    size = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(sign == 1, -size, size)


def settle(residual: Tensor, variance: Tensor, sent: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """r and v of the sent elements after the send."""
    if rule.tau is not None:
        # with r as it was before the send: what is left is then still unambiguous for alpha >= 1
        tau = float(torch.tensor(rule.tau, dtype=torch.float32))
        square = float(torch.tensor(tau, dtype=torch.float32) * torch.tensor(tau, dtype=torch.float32))
        return residual - sent, (variance - residual.abs() * 2 * tau + square).clamp_(min=0)
    if rule.feedback:  # the rest counts as one contribution; with v = 0 it would go out again at once
        rest = residual - sent
        return rest, rest * rest
    return torch.zeros_like(residual), torch.zeros_like(variance)


def add(index: Tensor, code: Tensor, exponents: Tensor, layout: Layout, rule: Rule, out: Tensor) -> None:
    """out += what one message says; its places are unique, so the result does not depend on their order."""
    out.index_add_(0, index, values(index, code, exponents, layout, rule))

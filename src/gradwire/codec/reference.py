"""Plain torch for steps 2 to 4 and 6: the definition of right, on any device.

Every operation is rounded to float32 by itself and none is fused, so that every device decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.codec import compact, header
from gradwire.codec import words as wire_words
from gradwire.codec.form import Blocks, Shape
from gradwire.codec.header import Parts
from gradwire.codec.interface import (
    GOLDEN,
    NOTHING,
    PROBLEMS,
    ROUNDING,
    SMALLEST,
    WINDOW,
    Inputs,
    Rule,
    Selection,
)
from gradwire.codec.limits import BINS, SHIFT, limits
from gradwire.errors import MessageError
from gradwire.layout import Layout, Slot

LOW = 0xFFFFFFFF


def encode(inputs: Inputs, shape: Shape, rule: Rule, step: int) -> tuple[Tensor, Selection]:
    """`select`, and the message of it that is to be sent."""
    chosen = select(inputs, shape.layout, rule, shape.capacity, step, shape.chunk)
    orders, body, counts = None, chosen.words, chosen.counts
    if shape.blocks is not None:
        orders, body = pack(chosen.words, counts, chosen.codes, shape.blocks, shape.chunk)
        counts = torch.zeros_like(counts)  # its blocks count for themselves
    return seal(shape, step, Parts(chosen.finite, counts, chosen.passed, chosen.exponents, orders, body)), chosen


def select(inputs: Inputs, layout: Layout, rule: Rule, capacity: Sequence[int], step: int, chunk: int) -> Selection:
    """Accumulate, decide, quantize: changes r and v in place and returns the words of who is sent, `chunk` places each.

    r += g;  v += m;  sent where r^2 > alpha v + floor^2 (r = v = 0 after it), elsewhere v *= zeta. With a density: sent
    where the score r^2 - alpha v is among the largest of its tensor.
    `capacity`: how many elements of each tensor fit; the others wait as if they had not passed.
    """
    grad, moment, residual, variance, active = inputs
    if variance is None or moment is None:  # nobody keeps them: zeros say the same
        moment, variance = torch.zeros_like(grad), torch.zeros_like(grad)
    live = None if active is None else layout.spread(active)
    finite = accumulate(grad, moment, residual, variance, live)
    if rule.density is None:
        passes = decide(residual, variance, live, rule)
    else:
        passes = decide_by_score(residual, variance, live, layout, rule)
    exponents, code, passes = quantize(residual, passes, layout, rule)
    index = passes.nonzero().squeeze(1)
    passed = torch.bincount(layout.slot_of(index), minlength=len(layout)).int()
    if active is not None:
        passed = torch.where(active, passed, -1)
    index = fit(size_class(residual[index], code[index], rule), index, passed, layout, capacity, step)
    code = code[index]
    undo = settle(index, values(index, code, exponents, layout, rule), residual, variance, live, rule)
    cells = layout.slot_of(index) * (WINDOW + 1) + (code & WINDOW)
    codes = torch.bincount(cells, minlength=len(layout) * (WINDOW + 1)).int().view(-1, WINDOW + 1)
    counts = torch.bincount(index // chunk, minlength=max(1, -(-layout.numel // chunk))).int()
    words = torch.zeros(sum(capacity), dtype=torch.int32, device=index.device)
    words[: len(index)] = wire_words.pack(index, code, chunk)
    return Selection(words, counts, codes, exponents, passed, finite, undo)


def accumulate(grad: Tensor, moment: Tensor, residual: Tensor, variance: Tensor, live: Tensor | None) -> Tensor:
    """r += g, v += m where both stay finite; a bad value adds nothing. Returns whether all were good, bool []."""
    sums = (residual, residual + grad), (variance, variance + moment)
    good = torch.isfinite(sums[0][1]) & torch.isfinite(sums[1][1])
    if live is None:
        finite = good.all()
    else:
        finite = (good | ~live).all()
        good &= live
    for held, total in sums:
        held.copy_(torch.where(good, total, held))
    return finite


def decide(residual: Tensor, variance: Tensor, live: Tensor | None, rule: Rule) -> Tensor:
    """The elements that are unambiguous, bool [N]."""
    size = residual.abs()
    floor = torch.tensor(rule.floor, dtype=torch.float32)  # squared in float32, as a kernel does
    passes = (residual * residual > variance * rule.alpha + float(floor * floor)) & (size >= SMALLEST)
    if rule.tau is not None:
        passes &= size > rule.tau
    return passes if live is None else passes & live


def decide_by_score(residual: Tensor, variance: Tensor, live: Tensor | None, layout: Layout, rule: Rule) -> Tensor:
    """About k = max(1, floor(density n)) elements of every tensor of n, those of the largest scores, bool [N].

    s = fl(fl(r r) - fl(alpha v)) counts where s > 0 and |r| >= SMALLEST; the rest of the definition is in limits.py.
    """
    score = residual * residual - variance * rule.alpha
    counted = (score > 0) & (residual.abs() >= SMALLEST)
    if live is not None:
        counted &= live
    bits, index = score.view(torch.int32), counted.nonzero().squeeze(1)
    cells = layout.slot_of(index) * BINS + (bits[index] >> SHIFT)
    histogram = torch.bincount(cells, minlength=len(layout) * BINS).view(len(layout), BINS)
    return counted & (bits >= layout.spread(limits(histogram, layout, rule)))


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


def size_class(residual: Tensor, code: Tensor, rule: Rule) -> Tensor:
    """Where room is short, class 0 goes first: d itself, or with tau how many binades |r| is above it, 7 at the end."""
    if rule.tau is None:
        return code & WINDOW
    binade = torch.tensor(rule.tau, dtype=torch.float32).view(torch.int32) >> 23
    above = (residual.abs().view(torch.int32) >> 23) - int(binade)
    return WINDOW - above.clamp(max=WINDOW)


def fit(classes: Tensor, index: Tensor, passed: Tensor, layout: Layout, capacity: Sequence[int], step: int) -> Tensor:
    """The places that fit, ascending; `passed` [K] of them are in each tensor."""
    counts = passed.clamp(min=0).tolist()
    if all(count <= room for count, room in zip(counts, capacity, strict=True)):
        return index
    parts = zip(torch.split(classes, counts), torch.split(index, counts), layout, capacity, strict=True)
    return torch.cat([_largest(*part, step) for part in parts])


def _largest(classes: Tensor, index: Tensor, slot: Slot, capacity: int, step: int) -> Tensor:
    """`capacity` places of one tensor: largest classes first, inside the last one from a place that rotates."""
    if len(index) <= capacity:
        return index
    within = torch.bincount(classes, minlength=WINDOW + 1).cumsum(0)  # elements in this class or a larger one
    last = int((within <= capacity).sum())  # the class that does not fit whole
    whole, partial = index[classes < last], index[classes == last]
    start = slot.offset + step * GOLDEN % slot.numel
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


def settle(
    index: Tensor, sent: Tensor, residual: Tensor, variance: Tensor, live: Tensor | None, rule: Rule
) -> Callable[[], None]:
    """r and v after the send of the values `sent` at `index`, v decayed elsewhere. Returns what takes the send back."""
    r, v = residual[index], variance[index]
    variance.copy_(variance * rule.zeta if live is None else torch.where(live, variance * rule.zeta, variance))
    residual[index], variance[index] = remainder(r, v, sent, rule)

    def undo() -> None:
        residual[index], variance[index] = r, v

    return undo


def remainder(r: Tensor, v: Tensor, sent: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """r and v of the sent elements after the send."""
    if rule.tau is not None:
        # with r as it was before the send: what is left is then still unambiguous for alpha >= 1
        tau = float(torch.tensor(rule.tau, dtype=torch.float32))
        square = float(torch.tensor(tau, dtype=torch.float32) * torch.tensor(tau, dtype=torch.float32))
        return r - sent, (v - r.abs() * 2 * tau + square).clamp_(min=0)
    if rule.feedback:  # the rest counts as one contribution; with v = 0 it would go out again at once
        rest = r - sent
        return rest, rest * rest
    return torch.zeros_like(r), torch.zeros_like(r)


def decode(messages: Tensor, shape: Shape, rule: Rule, step: int, out: Tensor) -> Tensor:
    """out = the mean over the ranks, in rank order: sum_w value_w / W, divided before the sum, as DDP does it.

    Returns what is wrong with the messages [W, words], in the order of `problems_of`: bool [W, problems]. If anything
    is, `out` stays as it is.
    """
    problems = inspect(messages, shape, step)
    words, counts, sound = messages[:, shape.body], messages[:, shape.counts], ~problems.any(1)
    if shape.blocks is not None:
        words, counts, broken = unpack(messages[:, shape.orders], words, sound, shape.blocks, shape.chunk)
        problems, sound = torch.cat([problems, broken[:, None]], 1), sound & ~broken
    exponents = header.exponents_of(messages, shape)
    return torch.cat([problems, add(words, counts, sound, exponents, shape.layout, rule, shape.chunk, out)], 1)


def add(
    words: Tensor, counts: Tensor, sound: Tensor, exponents: Tensor, layout: Layout, rule: Rule, chunk: int, out: Tensor
) -> Tensor:
    """The same from words [W, room], of which the first sum(counts [W, C]) count: bool [W, PROBLEMS].

    If anything is wrong with those that are `sound` [W], or one is not sound, `out` stays as it is.
    """
    found = torch.zeros(len(words), len(PROBLEMS), dtype=torch.bool, device=words.device)
    added, share = torch.zeros_like(out), 1 / len(words)
    for rank in sound.nonzero().flatten().tolist():
        index, code = wire_words.unpack(words[rank, : int(counts[rank].sum())], counts[rank], chunk)
        found[rank] = check(index, code, exponents[rank], layout, rule)
        if not found.any():
            added.index_add_(0, index, values(index, code, exponents[rank], layout, rule) * share)
    if sound.all() and not found.any():
        out.copy_(added)
    return found


def check(index: Tensor, code: Tensor, exponents: Tensor, layout: Layout, rule: Rule) -> Tensor:
    """What is wrong with the elements of one message: bool [PROBLEMS].

    Places must lie in the bucket and ascend, and no value may be smaller than float32 can say.
    """
    outside = (index >= layout.numel).any() | (index[1:] <= index[:-1]).any()
    inside = index.clamp(max=max(0, layout.numel - 1))
    small = exponents[layout.slot_of(inside)] - (code & WINDOW) < -126
    return torch.stack([outside, small.any() & (rule.tau is None)])


def pack(words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor]:
    """Words to the compact format: the order of the codes int32 [K], and the body."""
    index, code = wire_words.unpack(words[: int(counts.sum())], counts, chunk)
    return compact.pack(index, code, blocks)


def unpack(orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Back to words [W, room], counts [W, C]; bool [W]: which messages are not what their own directory says.

    Only messages that are `sound` [W] are looked into.
    """
    n_chunks, device = max(1, -(-blocks.layout.numel // chunk)), bodies.device
    words = torch.zeros(len(bodies), sum(blocks.capacity), dtype=torch.int32, device=device)
    counts = torch.zeros(len(bodies), n_chunks, dtype=torch.int32, device=device)
    broken = torch.zeros(len(bodies), dtype=torch.bool, device=device)
    for rank in sound.nonzero().flatten().tolist():
        try:
            index, code = compact.unpack(orders[rank], bodies[rank], blocks)
        except MessageError:
            broken[rank] = True
            continue
        words[rank, : len(index)] = wire_words.pack(index, code, chunk)
        counts[rank] = torch.bincount(index // chunk, minlength=n_chunks)
    return words, counts, broken


def checksum(messages: Tensor) -> Tensor:
    """sum_i mix(x_i + i KEY) modulo 2^64 as two words, [..., 2], over all but x_4, which is where it stands.

    x_i = w_2i + 2^32 w_2i+1, an odd last word alone. `mix` is one to one, so one changed x always shows; where several
    change, what they add is as good as drawn, however they are related.
    """
    words = torch.nn.functional.pad(messages, (0, messages.shape[-1] % 2)).long()
    number = torch.arange(words.shape[-1] // 2, device=messages.device)
    x = ((words[..., ::2] & LOW) | (words[..., 1::2] << 32)) + number * _signed(header.KEY)
    for _ in range(2):
        x = (x ^ (x >> 32 & LOW)) * _signed(header.MULTIPLIER)
    mixed = (x ^ (x >> 32 & LOW)).masked_fill(number == header.CHECKSUM.start // 2, 0)
    return mixed.sum(-1, keepdim=True).view(torch.int32)


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    return number - (number >> 63 << 64)


def seal(shape: Shape, step: int, parts: Parts) -> Tensor:
    """A whole message: head, checksum, body."""
    return header.write(shape, step, parts, checksum)


def inspect(messages: Tensor, shape: Shape, step: int) -> Tensor:
    """What is wrong with the heads: bool [W, len(header.PROBLEMS)]."""
    return header.check(messages, shape, step, checksum)

"""AdaComp, selection by bins: steps 2 to 4 and 6 (Chen et al., arXiv:1712.02679)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire import codec
from gradwire.arithmetic.finite import unsound
from gradwire.arithmetic.groups import ScaleGroups, cut
from gradwire.codec import header, numba_ready
from gradwire.codec.form import Blocks, block_length, room_words
from gradwire.codec.interface import GOLDEN, NOTHING
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Gather, Message
from gradwire.methods.residual import Residual, WithResidual

BROKEN = ("does not hold what its directory says", "has a scale that is no number >= 0")
PLACE = codec.CHUNK - 1  # the bits of a word that say where


class CountedPlaces(NamedTuple):
    """Who passes, where nobody waits to know how many: the number of them up to each place."""

    upto: Tensor  # int32 [N]

    def before(self, places: Tensor) -> Tensor:
        """How many pass before each place."""
        return self.upto[(places - 1).clamp(min=0)].where(places > 0, 0).long()

    def at(self, ordinals: Tensor) -> Tensor:
        """Where the i-th is; beyond the last one any place of the bucket."""
        return torch.searchsorted(self.upto, (ordinals + 1).int()).clamp_(max=len(self.upto) - 1)


class ListedPlaces(NamedTuple):
    """The same, where their places are known."""

    places: Tensor  # int64 [n], ascending

    def before(self, places: Tensor) -> Tensor:
        return torch.searchsorted(self.places, places)

    def at(self, ordinals: Tensor) -> Tensor:
        n_places = len(self.places)
        return self.places[ordinals.clamp(max=n_places - 1)] if n_places else torch.zeros_like(ordinals)


Passing = CountedPlaces | ListedPlaces


class ChosenPlaces(NamedTuple):
    """What is sent, without waiting for how many that are: M is the room of all tensors together."""

    places: Tensor  # int64 [M], ascending; behind the last that counts some place of the bucket
    tensors: Tensor  # int64 [M], which tensor each is in
    valid: Tensor  # bool [M], the first sum(counts)
    counts: Tensor  # int64 [K], elements sent of each tensor
    passed: Tensor  # int64 [K], elements that asked for room


@dataclass(frozen=True)
class AdaComp(WithResidual, Gather):
    """Sends what this step's gradient brings up to the largest of its bin, as a sign and a place.

    G = r + g, H = G + g; an element goes where |H| >= max |G| of its bin, as sign(G) s, and r = G - what was sent; s is
    the mean of max |G| over the bins of a tensor.
    bin: consecutive elements that are compared; convolution_bin: the same in tensors of three dimensions and more.
    Where room is short, a place that changes with the step says who goes first: all that pass are about as large.
    """

    bin: int = 500
    convolution_bin: int = 50

    needs_room: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("bin", "convolution_bin"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"AdaComp: {name} must be a whole number >= 1, got {value}")

    def encode(self, grad: Tensor, moment: Tensor, state: Residual, context: Context) -> Message:
        bins, residual = _bins(context.layout, self.bin, self.convolution_bin), state.residual
        passing, largest, finite = _select(grad, residual, bins, context)
        n_bins = bins.n_groups(grad.device)
        sums = torch.segment_reduce(largest.double(), "sum", lengths=n_bins, initial=0, unsafe=True)
        scales = (sums / n_bins).float()
        chosen = _fit(passing, context, grad.device)
        before = residual[chosen.places]
        values = torch.copysign(scales[chosen.tensors], before).masked_fill_(~chosen.valid, 0.0)
        residual.index_add_(0, chosen.places, values, alpha=-1)

        def undo() -> None:
            residual[chosen.places] = before  # a place that stands there twice has the same value twice

        passed = chosen.passed.int() if context.active is None else chosen.passed.int().where(context.active, -1)
        data = self._message(finite, chosen, passed, before, scales, context)
        return Message(data, undo, chosen.counts, passed, (chosen.counts * scales).sum())

    def _message(
        self, finite: Tensor, chosen: ChosenPlaces, passed: Tensor, before: Tensor, scales: Tensor, context: Context
    ) -> Tensor:
        kernel, chunk = codec.select(before.device), codec.CHUNK
        words = (chosen.places % chunk).int() | torch.signbit(before).int() << 31
        counts = torch.zeros(self._shape(context).chunks, dtype=torch.int32, device=before.device)
        counts.index_add_(0, chosen.places // chunk, chosen.valid.int())
        codes = torch.nn.functional.pad(chosen.counts[:, None].int(), (0, 7))  # signs only: d = 0
        orders, packed = kernel.pack(words.masked_fill_(~chosen.valid, 0), counts, codes, self._blocks(context), chunk)
        body = torch.cat([packed, scales.view(torch.int32)])
        none = torch.full_like(passed, NOTHING)
        parts = header.Parts(finite, torch.zeros_like(counts), passed, none, orders, body)
        return kernel.seal(self._shape(context), context.step, parts)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = the mean over the ranks, in rank order; nothing changes on error."""
        kernel, shape, blocks = codec.select(out.device), self._shape(context), self._blocks(context)
        problems = kernel.inspect(messages, shape, context.step)
        body, orders, sound = messages[:, shape.body], messages[:, shape.orders], ~problems.any(1)
        words, counts, broken = kernel.unpack(orders, body[:, : blocks.words], sound, blocks, codec.CHUNK)
        scales = body[:, blocks.words :].contiguous().view(torch.float32)
        problems = torch.cat([problems, broken[:, None], unsound(scales)[:, None]], 1)
        refuse = partial(header.refuse, problems, header.PROBLEMS + BROKEN, messages, shape, context.step)
        if out.device.type == "cpu":
            refuse()
        mean, bad = out.zero_() if out.device.type == "cpu" else torch.zeros_like(out), problems.any()
        for rank in range(len(messages)):
            used = counts[rank] * ~problems[rank].any()
            _add(words[rank], used, scales[rank] * (1 / len(messages)), mean, context.layout)
        if mean is not out:
            torch.where(bad, out, mean, out=out)
        return Arrival((messages[:, 5] & 1).all(), messages[:, shape.passed].amax(0), bad, refuse)

    def words(self, numel: int, room: int) -> int:
        """In the body, for one tensor: the compact format at its worst, and the scale."""
        if room == 0:
            return 1
        words, n_blocks = room_words(numel, room, hybrid=True), -(-numel // block_length(numel, room))
        return -(-n_blocks * words.bit_length() // 32) + words + 1

    def _shape(self, context: Context) -> header.Shape:
        room = self._blocks(context).words + len(context.layout)
        return header.Shape(context.layout, room, codec.CHUNK, header.COMPACT)

    def _blocks(self, context: Context) -> Blocks:
        return Blocks.of(context.layout, context.capacity, hybrid=True)


def _select(grad: Tensor, residual: Tensor, bins: ScaleGroups, context: Context) -> tuple[Passing, Tensor, Tensor]:
    """r = G; who passes, max |G| of the bins [B], 0 in tensors without a gradient, and whether all was finite."""
    live = None if context.active is None else bins.of_tensors(context.active)
    if numba_ready(grad.device):
        from gradwire.methods.adacomp import cpu

        places, largest, finite = cpu.select(residual, grad, live, bins)
        return ListedPlaces(places), largest, finite
    bad = ~torch.isfinite(residual + grad)
    good = context.only(grad.masked_fill(bad, 0.0))
    residual += good  # a bad value adds nothing
    largest = bins.largest(residual)
    passes = ((residual + good).abs() >= bins.spread(largest)) & (residual != 0)
    if live is not None:
        largest, awake = largest.where(live, 0.0), bins.spread(live)
        passes, bad = passes & awake, bad & awake
    return CountedPlaces(passes.cumsum(0, dtype=torch.int32)), largest, ~bad.any()


def _fit(passing: Passing, context: Context, device: torch.device) -> ChosenPlaces:
    """Those that pass and have room: tensor by tensor, from a place on that rotates, and from the front again."""
    starts = [context.step * GOLDEN % max(1, slot.numel) for slot in context.layout]
    start, room = torch.tensor([starts, context.capacity]).to(device, non_blocking=True)
    edges = _edges(context.layout, device)
    before = passing.before(edges)
    begin, passed = before[:-1], before.diff()
    counts = torch.minimum(passed, room)
    skipped = (passing.before(edges[:-1] + start) - begin).where(passed > room, 0)
    again = (skipped + counts - passed).clamp(min=0)  # sent from the front

    number, ends = torch.arange(sum(context.capacity), device=device), counts.cumsum(0)
    tensors = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
    within = number - (ends - counts)[tensors]
    ordinal = begin[tensors] + within + (skipped - again)[tensors].where(within >= again[tensors], 0)
    return ChosenPlaces(passing.at(ordinal), tensors, number < ends[-1], counts, passed)


def _add(words: Tensor, counts: Tensor, scales: Tensor, out: Tensor, layout: Layout) -> None:
    """out += sign * scale of the first sum(counts [C]) of one rank's words."""
    number, ends = torch.arange(len(words), device=out.device), counts.cumsum(0)
    chunk = torch.searchsorted(ends, number, right=True)
    idle = number >= ends[-1]
    places = ((words & PLACE) + chunk * codec.CHUNK).masked_fill_(idle, 0)
    sizes = scales[layout.slot_of(places)].masked_fill_(idle, 0.0)
    out.index_add_(0, places, torch.where(words < 0, -sizes, sizes))


@lru_cache(maxsize=64)
def _bins(layout: Layout, length: int, convolution_length: int) -> ScaleGroups:
    """Every bin but a tensor's last is full."""
    return cut(layout, [length if len(slot.shape) < 3 else convolution_length for slot in layout])


@lru_cache(maxsize=64)
def _edges(layout: Layout, device: torch.device) -> Tensor:
    """Where the tensors begin, and the last ends, int64 [K + 1]."""
    return torch.tensor([0, *(slot.offset + slot.numel for slot in layout)], device=device)

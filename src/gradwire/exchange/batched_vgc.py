"""VGC's workers in one process batched: every kernel is called once for all of them. Steps 2 to 6.

A vector of W workers is cut into W chunks, so the words of a chunk are a worker's own, bit for bit. They go straight
to the decoder's sum: no message is written, and its length is known from its room.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire import codec as kernels
from gradwire.codec.header import WORD_BYTES
from gradwire.exchange.counting import Counts
from gradwire.exchange.step import Part, sound
from gradwire.layout import Layout
from gradwire.methods.base import Compressor, powers, tensors
from gradwire.methods.strom import Strom
from gradwire.methods.vgc import VGC


def fits(compressor: Any, layout: Layout) -> bool:
    """Whether it can be done: for the methods of these kernels, where a worker's message is one chunk."""
    return isinstance(compressor, VGC | Strom) and layout.numel <= kernels.CHUNK


def carried_over(state: Any, compressor: Compressor, layout: Layout) -> Any:
    """A state for `compressor` with what another of the same method has held back; what is new begins at zero."""
    old = {name: getattr(state, name) for name in powers(state)}
    if not old or not isinstance(compressor, VGC):
        return state
    new = compressor.init(layout, old["residual"].device)
    if type(new) is type(state):
        return state
    for name in powers(new).keys() & old.keys():
        getattr(new, name).copy_(old[name])
    return new


class BatchedVGC:
    """The state of W workers in one, and what they do in a step."""

    def __init__(self, compressor: VGC | Strom, layout: Layout, workers: int, device: torch.device) -> None:
        self.layout, self.workers = layout, workers
        self.whole = Layout.of((slot.name, slot.shape) for _ in range(workers) for slot in layout)
        self.state = compressor.init(self.whole, device)
        self.use(compressor)

    def use(self, compressor: VGC | Strom) -> None:
        self.state = carried_over(self.state, compressor, self.whole)
        self.vgc = compressor if isinstance(compressor, VGC) else compressor.as_vgc

    def states(self) -> list[Any]:
        """Each worker's, as views."""
        shape = (self.workers, self.layout.numel)
        rows = zip(*(tensor.view(shape) for tensor in tensors(self.state)), strict=True)
        return [type(self.state)(*row) for row in rows]

    def exchange(self, part: Part) -> int:
        """One part for all workers, gradients and moments [W, N]; the bytes of one message."""
        context, vgc, shape = part.context, self.vgc, (self.workers, len(self.layout))
        kernel, chunk = kernels.select(part.grad.device), self.layout.numel
        room = context.capacity * self.workers
        chosen = vgc.choose(part.grad.flatten(), part.moment.flatten(), self.state, context, self.whole, room, chunk)
        part.step.undo.append(chosen.undo)
        if sum(context.capacity):
            words, fine = self._words(chosen, sum(context.capacity)), torch.ones_like(chosen.counts, dtype=torch.bool)
            exponents = chosen.exponents.view(shape)
            kernel.add(words, chosen.counts[:, None], fine, exponents, self.layout, vgc.rule, kernels.CHUNK, part.out)
        passed, sent = chosen.passed.view(shape), chosen.codes.sum(1).view(shape)
        part.arrival = sound(chosen.finite, passed.amax(0))
        part.counts = Counts(sent.sum(0), passed.clamp(min=0).sum(0), vgc.norm(chosen.codes, chosen.exponents))
        return WORD_BYTES * vgc.shape(context).words

    def _words(self, chosen: kernels.Selection, room: int) -> Tensor:
        """[W, room]: behind a worker's last word there are others'."""
        starts = chosen.counts.long().cumsum(0) - chosen.counts
        index = starts[:, None] + torch.arange(room, device=starts.device)
        return chosen.words[index.clamp_(max=len(chosen.words) - 1)]

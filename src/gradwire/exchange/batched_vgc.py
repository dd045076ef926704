"""VGC's workers in one process batched: every kernel is called once for all of them. Steps 2 to 6.

They take the step of one method (step.py) whose message is the words of all. A vector of W workers is cut into W
chunks, so the words of a chunk are a worker's own, bit for bit, and go straight to the decoder's sum. No message is
written; its length is known from its room.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire import codec as kernels
from gradwire.codec.header import WORD_BYTES
from gradwire.exchange.step import Answer, Part, answered, exchange, sound
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Compressor, Context, Gather, Message, powers, tensors
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


def of_worker(context: Context, rank: int) -> Context:
    """Of one worker, out of a context of all, whose `active` may be [W, K]."""
    active = context.active
    return replace(context, rank=rank, active=active[rank] if active is not None and active.dim() == 2 else active)


class BatchedVGC(Gather):
    """VGC's workers as one: the state of all of them, and their step as that of one method."""

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
        """The step of all workers, whose gradients and moments are [W, N]; the bytes that one of them gave."""
        talk = exchange(part)
        ask = next(talk)
        total = None if ask.summand is None else ask.summand.sum(0)
        answered(talk, Answer(ask.message, total))
        n_bytes = WORD_BYTES * self.vgc.shape(part.context).words
        return n_bytes if total is None else n_bytes + total.nbytes

    def encode(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> Message:
        """The words of every worker, [W, room]: behind a worker's last word there are others'."""
        room, shape = sum(context.capacity), (self.workers, len(self.layout))
        vgc, capacity, chunk = self.vgc, context.capacity * self.workers, self.layout.numel
        if context.active is not None:
            context = replace(context, active=context.active.expand(shape).flatten(), layout=self.whole)
        chosen = vgc.choose(grad.flatten(), moment.flatten(), state, context, self.whole, capacity, chunk)
        self._sent = chosen  # for `decode`: what heads would say
        starts = chosen.counts.long().cumsum(0) - chosen.counts
        index = starts[:, None] + torch.arange(room, device=grad.device)
        words = chosen.words[index.clamp_(max=max(len(chosen.words) - 1, 0))]
        passed, sent = chosen.passed.view(shape).clamp(min=0).sum(0), chosen.codes.sum(1).view(shape).sum(0)
        return Message(words, chosen.undo, sent, passed, vgc.norm(chosen.codes, chosen.exponents), chosen.finite)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = the mean over the workers, added up in their order."""
        sent, shape = self._sent, (self.workers, len(self.layout))
        out.zero_()
        if messages.numel():
            fine, counts = torch.ones_like(sent.counts, dtype=torch.bool), sent.counts[:, None]
            exponents, kernel = sent.exponents.view(shape), kernels.select(out.device)
            kernel.add(messages, counts, fine, exponents, self.layout, self.vgc.rule, kernels.CHUNK, out)
        return sound(sent.finite, sent.passed.view(shape).amax(0))

    def waiting(self, state: Any, context: Context) -> Tensor:
        """[W, N]"""
        own = enumerate(self.states())
        return torch.stack([self.vgc.waiting(one, of_worker(context, rank)) for rank, one in own])

    def clear(self, state: Any, context: Context) -> None:
        for rank, one in enumerate(self.states()):
            self.vgc.clear(one, of_worker(context, rank))

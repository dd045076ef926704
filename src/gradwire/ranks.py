"""W workers of one method in one process: the very encode, messages and decode, without torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.capacity import Capacity, Plan
from gradwire.compressors.base import Context, Outcome, Rounds, Sum, needs_room, tensors
from gradwire.compressors.held import everything
from gradwire.layout import Layout

CPU = torch.device("cpu")
WORD_BYTES = 4


@dataclass
class Done:
    """One step of all workers."""

    mean: Tensor  # [N]
    finite: bool
    n_bytes: int  # that one worker sent
    undo: list[Callable[[], None]] = field(default_factory=list)


class Ranks:
    """Call it with the gradient of every worker, once a step.

    planned: messages of methods that need room are as long as in a training, the first step and others dense; else
    `rooms` says how many elements of each tensor fit, None all of them.
    """

    def __init__(
        self, compressor: Any, layout: Layout, world_size: int = 1, planned: bool = False, device: torch.device = CPU
    ) -> None:
        self.compressor, self.layout, self.world_size, self.number = compressor, layout, world_size, 0
        stateless = isinstance(compressor, Sum)
        self.states = [None if stateless else compressor.init(layout, device) for _ in range(world_size)]
        self.rooms: tuple[int, ...] | None = None
        self.needs_room = needs_room(compressor)
        self.planned = planned and self.needs_room
        numels = {slot.name: slot.numel for slot in layout}
        self.capacity = Capacity(WORD_BYTES * layout.numel, world_size, numels)

    def context(self, active: Tensor | None = None, dense: bool = False) -> Context:
        capacity: tuple[int, ...] = ()
        if self.planned:
            plan = self.capacity.plan(self.compressor.words)
            capacity, dense = self.capacity.of(self.layout, plan), plan.dense
        elif self.needs_room:
            rooms = self.rooms if self.rooms is not None else tuple(slot.numel for slot in self.layout)
            capacity = (0,) * len(self.layout) if dense else rooms
        return Context(self.layout, self.number, capacity, active, self.world_size, dense)

    def __call__(
        self,
        grads: Sequence[Tensor],
        moments: Sequence[Tensor] | None = None,
        active: Tensor | None = None,
        dense: bool = False,
    ) -> Done:
        context = self.context(active, dense)
        if isinstance(self.compressor, Sum):
            done = self._cast(grads, self.compressor)
        elif isinstance(self.compressor, Rounds):
            done = self._summed(grads, context)
        else:
            done = self._gathered(grads, moments or [grad.square() / 4 for grad in grads], context)
        if context.dense:
            for state in self.states:
                self.compressor.clear(state, context)
        self.number += 1
        return done

    def _gathered(self, grads: Sequence[Tensor], moments: Sequence[Tensor], context: Context) -> Done:
        every = enumerate(zip(grads, moments, self.states, strict=True))
        sent = [
            self.compressor.encode(grad.clone(), moment, state, replace(context, rank=rank))
            for rank, (grad, moment, state) in every
        ]
        out = torch.full_like(grads[0], torch.nan)  # whatever lies there must not matter
        arrival = self.compressor.decode(torch.stack([message.data for message in sent]), out, context)
        n_bytes = sent[0].data.numel() * WORD_BYTES
        if context.dense:
            waiting = [self.compressor.waiting(state, context) for state in self.states]
            out = torch.stack(waiting).sum(0) / self.world_size
            n_bytes += self.layout.numel * WORD_BYTES
        if self.planned:
            self.capacity.note(self.layout, arrival.passed.tolist())
            self.capacity.end_step(Plan(context.dense))
        return Done(out, bool(arrival.finite), n_bytes, [message.undo for message in sent])

    def _summed(self, grads: Sequence[Tensor], context: Context) -> Done:
        talks = [
            everything(self.compressor, grad.clone(), state, context)
            if context.dense
            else self.compressor.rounds(grad.clone(), state, context)
            for grad, state in zip(grads, self.states, strict=True)
        ]
        outcomes, n_bytes = converse(talks)
        first = outcomes[0]
        assert all(torch.equal(one.mean, first.mean) for one in outcomes) or not bool(first.finite)
        return Done(first.mean, bool(first.finite), n_bytes, [one.undo for one in outcomes])

    def _cast(self, grads: Sequence[Tensor], compressor: Sum) -> Done:
        sent = [(grad / self.world_size).to(compressor.wire_dtype(grad.dtype)) for grad in grads]
        mean = torch.stack(sent).sum(0).float()
        return Done(mean, bool(torch.isfinite(mean).all()), sent[0].numel() * sent[0].element_size())

    def snapshot(self) -> list[list[Tensor]]:
        """A copy of every worker's state."""
        return [[] if state is None else [tensor.clone() for tensor in tensors(state)] for state in self.states]


def converse(talks: Sequence[Generator[Tensor, Tensor, Outcome]]) -> tuple[list[Outcome], int]:
    """The rounds of all workers, sum by sum, and the bytes that one of them gave to the sums."""
    said, n_bytes = [next(talk) for talk in talks], 0
    outcomes: list[Outcome] = []
    while not outcomes:
        n_bytes += said[0].numel() * said[0].element_size()
        total = torch.stack(said).sum(0)
        for number, talk in enumerate(talks):
            try:
                said[number] = talk.send(total.clone())
            except StopIteration as end:
                outcomes.append(end.value)
    return outcomes, n_bytes

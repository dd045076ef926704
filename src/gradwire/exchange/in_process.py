"""W workers of one method in one process: the very encode, messages and decode, without torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.errors import AttachError
from gradwire.exchange.batched_vgc import Abreast, fits
from gradwire.exchange.budget import check
from gradwire.exchange.counting import Meter
from gradwire.exchange.in_process_graph import FIRST, Repeated, converse, repeats
from gradwire.exchange.room import Capacity, Plan, most_buckets
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Message, Outcome, Sum, tensors
from gradwire.methods.fixed import Body

CPU = torch.device("cpu")
Rows = Sequence[Tensor] | Tensor  # a vector [N] of each worker


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
    abreast: all workers at once where the method allows it, without writing their messages; the same bits.
    """

    def __init__(
        self,
        compressor: Any,
        layout: Layout,
        world_size: int = 1,
        planned: bool = False,
        device: torch.device = CPU,
        abreast: bool = False,
    ) -> None:
        numels, n_bytes = {slot.name: slot.numel for slot in layout}, WORD_BYTES * layout.numel
        self.capacity = Capacity(n_bytes, world_size, numels, most_buckets(n_bytes))  # heads as those of real workers
        self.needs_room = compressor.needs_room
        self.planned = planned and self.needs_room
        self._check(compressor)
        self.compressor, self.layout, self.world_size, self.number = compressor, layout, world_size, 0
        self.abreast = Abreast(compressor, layout, world_size, device) if abreast and fits(compressor, layout) else None
        if self.abreast is not None:
            self.states = self.abreast.states()
        else:
            stateless = compressor.kind == "sum"
            self.states = [None if stateless else compressor.init(layout, device) for _ in range(world_size)]
        self.repeated: Repeated | None = None
        self._repeats = abreast and repeats(compressor, device)
        self._steps_alike = 0  # of these options, in this process
        self.rooms: tuple[int, ...] | None = None
        self.meter = Meter(layout.numel * world_size, device)  # of all workers together

    def use(self, compressor: Any) -> None:
        """The same method with other options."""
        if compressor == self.compressor:
            return
        if _form(compressor) is not _form(self.compressor):
            raise ValueError(
                f"{compressor!r} holds back something else than {self.compressor!r}: begin a new simulation"
            )
        self._check(compressor)
        self.compressor, self.repeated, self._steps_alike = compressor, None, 0
        if self.abreast is not None:
            self.abreast.use(compressor)

    def _check(self, compressor: Any) -> None:
        """Before anything is changed: a budget that can be kept."""
        if not self.planned:
            return
        if compressor.most_rate is not None:
            raise AttachError(
                f"budget={compressor.budget!r}: workers in one process have no link and their steps no time of their "
                "own, so a rate means nothing: give max_bytes_per_step"
            )
        check(compressor, self.capacity)

    def context(self, active: Tensor | None = None, dense: bool = False) -> Context:
        capacity: tuple[int, ...] = ()
        density = None
        if self.planned:
            wanted = (self.compressor.most_bytes, self.compressor.share)
            plan = self.capacity.plan(self.compressor.words, *wanted)
            capacity, dense, density = self.capacity.of(self.layout, plan), plan.dense, plan.density
        elif self.needs_room:
            rooms = self.rooms if self.rooms is not None else tuple(slot.numel for slot in self.layout)
            capacity = (0,) * len(self.layout) if dense else rooms
        return Context(self.layout, self.number, capacity, active, self.world_size, dense, density=density)

    def __call__(
        self,
        grads: Rows,
        moments: Sequence[Tensor] | None = None,
        active: Tensor | None = None,
        dense: bool = False,
    ) -> Done:
        own = [grad.clone() for grad in grads]
        return self.exchange(own, moments or [grad.square() / 4 for grad in grads], active, dense)

    def exchange(self, grads: Rows, moments: Rows, active: Tensor | None = None, dense: bool = False) -> Done:
        """The same where the gradients are not needed any more: they may be written over."""
        context = self.context(active, dense)
        if self.compressor.kind == "sum":
            done = self._cast(grads, self.compressor)
        elif self._repeats and isinstance(grads, Tensor) and self._steps_alike >= FIRST and not context.dense:
            done = self._again(grads, context)
        elif self.compressor.kind == "rounds":
            done = self._summed(grads, context)
        else:
            done = self._gathered(grads, moments, context)
        if context.dense and done.finite:
            for state in self.states:
                self.compressor.clear(state, context)
        self.number += 1
        self._steps_alike += 1
        n_bytes = self.world_size * done.n_bytes
        self.meter.count(n_bytes, n_bytes, self.world_size * WORD_BYTES * self.layout.numel)
        self.meter.end_step(context.dense)
        return done

    def _gathered(self, grads: Rows, moments: Rows, context: Context) -> Done:
        if self.abreast is not None:
            crossed = self.abreast(_rows(grads), _rows(moments), context)
            out, undo, n_bytes = crossed.mean, [crossed.undo], crossed.n_bytes
            finite, passed = _read(crossed.finite, crossed.passed.amax(0))
            if not context.dense:
                asked = crossed.passed.clamp(min=0).sum(0)
                self.meter.elements(self.layout, crossed.sent.sum(0), asked, crossed.norm)
        else:
            out, undo, n_bytes, finite, passed = self._one_by_one(grads, moments, context)
        if context.dense:
            waiting = [self.compressor.waiting(state, context).mul_(1 / self.world_size) for state in self.states]
            out = torch.stack(waiting).sum(0)
            n_bytes += self.layout.numel * WORD_BYTES
            self._count([], True)
        if self.planned and finite:
            self.capacity.note(self.layout, passed)
            self.capacity.end_step(Plan(context.dense))
        return Done(out, finite, n_bytes, undo)

    def _one_by_one(
        self, grads: Rows, moments: Rows, context: Context
    ) -> tuple[Tensor, list[Callable[[], None]], int, bool, list[int]]:
        """Every worker's message is written, and read by all."""
        every = enumerate(zip(grads, moments, self.states, strict=True))
        sent = [
            self.compressor.encode(grad, moment, state, replace(context, rank=rank))
            for rank, (grad, moment, state) in every
        ]
        out = torch.full_like(grads[0], torch.nan)  # whatever lies there must not matter
        arrival = self.compressor.decode(torch.stack([message.data for message in sent]), out, context)
        finite, passed = _read(arrival.finite, arrival.passed, arrival)
        if not context.dense:
            self._count(sent, False)
        return out, [message.undo for message in sent], sent[0].data.numel() * WORD_BYTES, finite, passed

    def _summed(self, grads: Rows, context: Context) -> Done:
        talks = [
            self.compressor.everything(grad, state, context)
            if context.dense
            else self.compressor.rounds(grad, state, context)
            for grad, state in zip(grads, self.states, strict=True)
        ]
        outcomes, n_bytes = converse(talks)
        first, finite = outcomes[0], bool(outcomes[0].finite)
        if first.mean.device.type == "cpu":  # on a GPU every look would wait for it
            assert all(torch.equal(one.mean, first.mean) for one in outcomes) or not finite
        self._count(outcomes, context.dense)
        return Done(first.mean, finite, n_bytes, [one.undo for one in outcomes])

    def _again(self, grads: Tensor, context: Context) -> Done:
        self.repeated = self.repeated or Repeated(self.compressor, self.states, FIXED)
        made = self.repeated(grads, context)
        self._count(made.sent, False)
        return Done(made.mean, bool(made.finite), made.n_bytes, made.undo)

    def _cast(self, grads: Rows, compressor: Sum) -> Done:
        sent = [(grad * (1 / self.world_size)).to(compressor.wire_dtype(grad.dtype)) for grad in grads]
        mean = torch.stack(sent).sum(0).float()
        self._count([], True)
        return Done(mean, bool(torch.isfinite(mean).all()), sent[0].numel() * sent[0].element_size())

    def _count(self, sent: Sequence[Message | Outcome | Body], everything: bool) -> None:
        """Elements of all workers, and |sent|_1."""
        norm = torch.stack([one.sent_norm for one in sent]).sum() if sent else None
        counts = [one.sent for one in sent if one.sent is not None]
        if everything or not counts:
            for _ in range(self.world_size):
                self.meter.everything(self.layout)
            return
        assert norm is not None
        asked = [one.passed for one in sent if isinstance(one, Message) and one.passed is not None]
        passed = torch.stack(asked).clamp_(min=0).sum(0) if asked else None
        self.meter.elements(self.layout, torch.stack(counts).sum(0), passed, norm)

    def snapshot(self) -> list[list[Tensor]]:
        """A copy of every worker's state."""
        return [[] if state is None else [tensor.clone() for tensor in tensors(state)] for state in self.states]


def _form(compressor: Any) -> type | None:
    """Of a worker's state."""
    return None if compressor.kind == "sum" else type(compressor.init(Layout.of([]), CPU))


def _rows(vectors: Rows) -> Tensor:
    return vectors if isinstance(vectors, Tensor) else torch.stack(list(vectors))


def _read(finite: Tensor, passed: Tensor | None, arrival: Arrival | None = None) -> tuple[bool, list[int]]:
    """(all finite, how many passed by tensor); the only place where the host waits for a GPU."""
    bad = finite.new_zeros(()) if arrival is None else arrival.bad
    parts = [torch.stack([finite, bad]).int(), *([] if passed is None else [passed.int()])]
    everywhere, wrong, *counts = torch.cat(parts).tolist()
    if wrong and arrival is not None:
        arrival.refuse()
    return bool(everywhere), counts

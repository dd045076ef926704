"""Steps of W workers of one method in one process: the very encode, messages and decode, without torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.header import WORD_BYTES
from gradwire.errors import AttachError
from gradwire.exchange.batched_vgc import BatchedVGC, carried_over, fits, of_worker
from gradwire.exchange.budget import check
from gradwire.exchange.counting import Counts, Meter
from gradwire.exchange.lockstep import FIRST, CapturedStep, in_lockstep
from gradwire.exchange.room import Capacity, RoomPlan, most_buckets
from gradwire.exchange.step import Part, Step, sound
from gradwire.layout import Layout
from gradwire.methods.base import Compressor, Context, powers, tensors

CPU = torch.device("cpu")
Rows = Sequence[Tensor] | Tensor  # a vector [N] of each worker


@dataclass
class Done:
    """One step of all workers."""

    mean: Tensor  # [N]
    finite: bool
    n_bytes: int  # that one worker sent
    undo: list[Callable[[], None]] = field(default_factory=list)  # of a step that was committed


class InProcess:
    """Call it with the gradient of every worker, once a step.

    planned: messages of methods that need room are as long as in a training, the first step and others dense; else
    `rooms` says how many elements of each tensor fit, None all of them.
    batched: all workers at once where the method allows it, without writing their messages; the same bits.
    buckets: in which the tensors lie with real workers, at most; None: as many as DDP makes.
    meter: that counts together with others'; None: one of its own.
    """

    def __init__(
        self,
        compressor: Any,
        layout: Layout,
        world_size: int = 1,
        planned: bool = False,
        device: torch.device = CPU,
        batched: bool = False,
        buckets: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        numels, n_bytes = {slot.name: slot.numel for slot in layout}, WORD_BYTES * layout.numel
        # heads as those of real workers
        self.capacity = Capacity(n_bytes, world_size, numels, most_buckets(n_bytes) if buckets is None else buckets)
        self.planned = planned and compressor.needs_room
        self._check(compressor)
        self.compressor, self.layout, self.world_size, self.number = compressor, layout, world_size, 0
        self.batched: BatchedVGC | None = None
        if batched and fits(compressor, layout):
            self.batched = BatchedVGC(compressor, layout, world_size, device)
            self.states = self.batched.states()
        else:
            self.states = [compressor.init(layout, device) for _ in range(world_size)]
        self.repeated: CapturedStep | None = None
        self._repeats = batched and device.type == "cuda" and compressor.alike
        self._steps_alike = 0  # of these options, in this process
        self.rooms: tuple[int, ...] | None = None
        self.meter = meter or Meter(layout.numel * world_size)  # of all workers together

    def use(self, compressor: Any) -> None:
        """The same method with other options."""
        if compressor == self.compressor:
            return
        if _held(compressor) != _held(self.compressor):
            raise ValueError(
                f"{compressor!r} holds back something else than {self.compressor!r}: begin a new simulation"
            )
        self._check(compressor)
        self.compressor, self.repeated, self._steps_alike = compressor, None, 0
        if self.batched is not None:
            self.batched.use(compressor)
            self.states = self.batched.states()
        else:
            self.states = [carried_over(state, compressor, self.layout) for state in self.states]

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
            method = self.compressor
            plan = self.capacity.plan(method.words, method.most_bytes, method.share)
            capacity, dense, density = self.capacity.of(self.layout, plan), plan.dense, plan.density
        elif self.compressor.needs_room:
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
        """The same where the gradients are not needed any more: they may be written over.

        active: bool [K], of all workers, or [W, K], of each.
        """
        context = self.context(active, dense)
        step = Step(self.number, RoomPlan(context.dense))
        if self.batched is not None:
            all_rows = _rows(grads), _rows(moments), torch.empty_like(grads[0])
            parts = [Part(step, self.batched, self.batched.state, context, *all_rows)]
            n_bytes = self.batched.exchange(parts[0])
        elif self._can_be_repeated(context) and isinstance(grads, Tensor):
            if self.repeated is None:
                self.repeated = CapturedStep(partial(self._parts, grads=grads, moments=moments), grads, context)
            parts, n_bytes = self.repeated(step, grads)
        else:
            parts = self._parts(step, context, grads, moments)
            n_bytes = in_lockstep(parts)
        mean = parts[0].out
        if parts[0].arrival is None:  # a sum
            parts[0].arrival = sound(torch.isfinite(mean).all())
        step.arrived(parts[0])
        undo = list(step.undo)
        finite = step.finish(self.capacity)
        self._count(parts, n_bytes, context.dense)
        self.number += 1
        self._steps_alike += 1
        return Done(mean, finite, n_bytes, undo if finite else [])

    def _can_be_repeated(self, context: Context) -> bool:
        """As a CUDA graph, which is captured with a gradient in every tensor."""
        return self._repeats and self._steps_alike >= FIRST and not context.dense and context.active is None

    def _parts(self, step: Step, context: Context, grads: Rows, moments: Rows) -> list[Part]:
        out = torch.full_like(grads[0], torch.nan)  # whatever lies there must not matter
        rows = enumerate(zip(grads, moments, self.states, strict=True))
        return [
            Part(step, self.compressor, state, of_worker(context, rank), grad, moment, out)
            for rank, (grad, moment, state) in rows
        ]

    def _count(self, parts: Sequence[Part], n_bytes: int, dense: bool) -> None:
        """Bytes and elements of all workers, and |sent|_1."""
        total = self.world_size * n_bytes
        self.meter.count(total, total, self.world_size * WORD_BYTES * self.layout.numel)
        columns = zip(*(part.counts for part in parts), strict=True)
        counts, asked, norms = ([one for one in column if one is not None] for column in columns)
        if dense or not counts:
            for _ in range(self.world_size):
                self.meter.elements(self.layout, Counts())
        else:
            passed = torch.stack(asked).clamp_(min=0).sum(0) if asked else None
            self.meter.elements(self.layout, Counts(torch.stack(counts).sum(0), passed, torch.stack(norms).sum()))
        self.meter.end_step(dense)

    def snapshot(self) -> list[list[Tensor]]:
        """A copy of every worker's state."""
        return [[tensor.clone() for tensor in tensors(state)] for state in self.states]


def _held(compressor: Compressor) -> set[str]:
    """The fields of a worker's state, but for the variance: where it begins to count it begins at zero."""
    return {*powers(compressor.init(Layout.of([]), CPU))} - {"variance"}


def _rows(vectors: Rows) -> Tensor:
    return vectors if isinstance(vectors, Tensor) else torch.stack(list(vectors))

"""One step: encode, exchange and decode every bucket, then commit or take back. Steps 2 to 6, written once.

`exchange` says what comes after what for one bucket of one worker, and asks for collectives on the way. A transport
begins these and answers with what came of them: a process group on the courier's thread (pipeline.py), W workers in
one process (in_process.py), the same as a CUDA graph, or nobody but a clock, for the planner (plan/costs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.exchange.counting import Counts
from gradwire.exchange.room import Capacity, RoomPlan
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Compressor, Context, Gather, Rounds, State, Sum, tensors


@dataclass
class Ask:
    """What one worker gives to the collectives, begun together: a message that all get, a tensor that is summed."""

    message: Tensor | None = None
    summand: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return sum(given.nbytes for given in (self.message, self.summand) if given is not None)


@dataclass
class Answer:
    """What came of it: every rank's message, [W, words], and the sum over the ranks."""

    messages: Tensor | None = None
    total: Tensor | None = None


Talk = Generator[Ask, Answer, None]


@dataclass
class Part:
    """One bucket of one worker in a step: what goes in, and what becomes of it."""

    step: Step
    method: Compressor
    state: Any
    context: Context
    grad: Tensor  # [N]: may be written over
    moment: Tensor  # [N], or none
    out: Tensor  # [N]: the mean over the ranks
    finite: Tensor | None = None  # bool []: of this worker's gradient, where the message does not say it
    arrival: Arrival | None = None
    counts: Counts = field(default_factory=Counts)  # for the statistics


def exchange(part: Part) -> Talk:
    """Steps 2 to 6 of one bucket on one worker; its state is changed, and what undoes that is in the step."""
    if isinstance(part.method, Gather):
        return _gathered(part, part.method)
    if isinstance(part.method, Rounds):
        return _in_rounds(part, part.method)
    assert isinstance(part.method, Sum)
    return _summed(part, part.method)


def answered(talk: Talk, answer: Answer) -> Ask | None:
    """What is asked next; None where that was all."""
    try:
        return talk.send(answer)
    except StopIteration:
        return None


def _gathered(part: Part, method: Gather) -> Talk:
    """One message; in a dense step all that is held back is summed beside it."""
    step, state, context = part.step, part.state, part.context
    message = method.encode(part.grad, part.moment, state, context)
    step.undo.append(message.undo)
    part.finite = message.finite
    whole = None
    if context.dense:
        whole = method.waiting(state, context)
        part.counts = Counts(norm=whole.abs().sum())
        whole.mul_(1 / context.world_size)
        _will_be_cleared(part)
    else:
        part.counts = Counts(message.sent, message.passed, message.sent_norm)
    answer = yield Ask(message.data, whole)
    assert answer.messages is not None
    part.arrival = method.decode(answer.messages, part.out, context)
    if answer.total is not None:
        part.out.copy_(answer.total)


def _in_rounds(part: Part, method: Rounds) -> Talk:
    """Sums, one after another; in a dense step one, of everything."""
    context = part.context
    talk = (method.everything if context.dense else method.rounds)(part.grad, part.state, context)
    summand = next(talk)
    try:
        while True:
            answer = yield Ask(summand=summand)
            assert answer.total is not None
            summand = talk.send(answer.total)
    except StopIteration as end:
        outcome = end.value
    if context.dense:
        _will_be_cleared(part)
    part.step.undo.append(outcome.undo)
    part.out = outcome.mean
    part.counts = Counts(outcome.sent, None, outcome.sent_norm)
    part.arrival = sound(outcome.finite)


def _summed(part: Part, method: Sum) -> Talk:
    """One sum: multiplied by 1/W before it, exactly as DDP does it."""
    summand = part.grad.mul_(1 / part.context.world_size).to(method.wire_dtype(part.grad.dtype))
    total = (yield Ask(summand=summand)).total
    assert total is not None
    if total is not part.out:
        part.out.copy_(total)


def _will_be_cleared(part: Part) -> None:
    """All that is held back goes out; if the optimizer's step may yet be left out, it can come back."""
    step, method, state, context = part.step, part.method, part.state, part.context
    if step.may_be_skipped:
        step.undo.append(_snapshot(state))
    step.clear.append(lambda: method.clear(state, context))


def sound(finite: Tensor, passed: Tensor | None = None) -> Arrival:
    """Of sums, which torch checks, and of messages that nobody has written."""
    return Arrival(finite, passed, torch.zeros_like(finite), lambda: None)


def _snapshot(state: State) -> Callable[[], None]:
    """Puts a whole state back as it is now."""
    now = [tensor.clone() for tensor in tensors(state)]

    def put_back() -> None:
        for tensor, before in zip(tensors(state), now, strict=True):
            tensor.copy_(before)

    return put_back


@dataclass
class Step:
    """One synced backward, of this worker or of all workers of a process.

    It is committed or taken back as a whole, because one bad bucket makes all of them NaN.
    """

    number: int
    plan: RoomPlan
    may_be_skipped: bool = False  # by a GradScaler, although every number is finite here
    undo: list[Callable[[], None]] = field(default_factory=list)
    clear: list[Callable[[], None]] = field(default_factory=list)
    arrivals: list[tuple[Layout, Arrival]] = field(default_factory=list)

    def arrived(self, part: Part) -> None:
        """A bucket is decoded."""
        if part.arrival is not None:
            self.arrivals.append((part.context.layout, part.arrival))

    def finish(self, room: Capacity) -> bool:
        """Commits the step or takes it back; whether every number of every rank is finite."""
        finite, counts = self.read()
        self.arrivals.clear()  # with the messages that they hold
        if not finite:
            self.take_back()
            return False
        for change in self.clear:
            change()
        if not self.may_be_skipped:
            self.undo.clear()
        for layout, passed in counts:
            room.note(layout, passed)
        if counts:
            room.end_step(self.plan)
        return True

    def take_back(self) -> None:
        """Every sent element gets its r and v back, as they were before the send."""
        changes, self.undo = self.undo, []
        try:
            for change in changes:
                change()
        except Exception as error:
            raise GradwireError(
                f"what this step had sent could not be taken back ({type(error).__name__}: {error}), so what is held "
                "back is not what it was: go on from a checkpoint"
            ) from error

    def read(self) -> tuple[bool, list[tuple[Layout, list[int]]]]:
        """(all finite, counts by bucket) of a step; the only place where the host waits for a GPU, once a step."""
        parts: list[Tensor] = [torch.zeros(0, dtype=torch.int32)] if not self.arrivals else []
        for _, arrival in self.arrivals:
            parts.append(torch.stack([arrival.finite, arrival.bad]).int())
            if arrival.passed is not None:
                parts.append(arrival.passed)
        numbers = iter(torch.cat(parts).tolist())
        finite, counts = True, []
        for layout, arrival in self.arrivals:
            finite &= bool(next(numbers))
            if next(numbers):
                arrival.refuse()
            if arrival.passed is not None:
                counts.append((layout, [next(numbers) for _ in layout.slots]))
        return finite, counts

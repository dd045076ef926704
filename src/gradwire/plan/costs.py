"""Times a method's encode and decode on given gradients, in this process alone, and counts what it would send.

As a training runs them (exchange/step.py): one state, buckets in order, the room of the messages from the counts of
the step before. What the other workers would send is this worker's own message, so that decoding is real as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.exchange.room import Capacity, RoomPlan, most_buckets
from gradwire.exchange.step import Answer, Ask, Part, Step, answered, exchange
from gradwire.layout import Layout
from gradwire.methods.base import Compressor, Context, Gather, Rounds, Sum
from gradwire.methods.table import to_spec
from gradwire.plan.model import NS_PER_MS, Cost

SETTLE = 4  # steps before the first that counts: kernels are compiled, and room follows the counts
MESSAGES = 8  # that are decoded at most: more take as much longer
TINY = 32  # elements of a bucket that is all overhead

Buckets = Sequence[Tensor]  # a flat tensor each


@dataclass
class _Times:
    """Of one step, all buckets together, in ms."""

    encode: float = 0.0
    decode: float = 0.0  # of all messages, or of what follows the first sum
    decode_one: float = 0.0  # of one message
    n_bytes: int = 0
    rounds: int = 0
    dense: bool = False


def measure(
    compressor: Compressor,
    layouts: Sequence[Layout],
    gradients: Buckets,
    moments: Buckets,
    world_size: int,
    repeats: int = 5,
) -> Cost:
    """What the method costs a worker of `world_size`; the factor of its second moments is left at 1.

    The step is repeated with changing signs, as if all of it were noise.
    """
    dry = Dry(compressor, layouts, world_size, gradients[0].device)
    noise = (gradients, [-gradient for gradient in gradients])
    for turn in range(SETTLE + repeats):
        dry.step(noise[turn % 2], moments)
    return dry.cost(repeats)


def usual(times: Iterable[float]) -> float:
    """The mean without the longest, which may have waited for anything."""
    ascending = sorted(times)
    return statistics.mean(ascending[:-1] or ascending)


@dataclass
class Dry:
    """One worker's part of every exchange, step after step; nothing is sent."""

    compressor: Compressor
    layouts: Sequence[Layout]
    world_size: int
    device: torch.device
    largest: Callable[[list[int]], list[int]] = list  # of counts, over all workers: room is for the one that sends most
    meet: Callable[[int], object] = lambda numel: None  # in the place of a sum over the workers, of so many elements
    gather: Callable[[Tensor], Tensor | None] = lambda message: None  # of all workers, [W, words]; None: all like this
    number: int = 0
    states: list[Any] = field(init=False)
    capacity: Capacity = field(init=False)
    times: list[_Times] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [self.compressor.init(layout, self.device) for layout in self.layouts]
        numels = {slot.name: slot.numel for layout in self.layouts for slot in layout}
        n_bytes = WORD_BYTES * sum(numels.values())
        self.capacity = Capacity(n_bytes, self.world_size, numels, most_buckets(n_bytes))

    @property
    def n_messages(self) -> int:
        """That are decoded together."""
        return min(self.world_size, MESSAGES) if self.compressor.kind == "gather" else 1

    def step(self, gradients: Buckets, moments: Buckets, lean: bool = False) -> None:
        """A flat float32 tensor a bucket. lean: nothing that a training would not do, else they are not changed."""
        method, room = self.compressor, self.compressor.needs_room
        wanted = (method.most_bytes, method.share)
        plan = self.capacity.plan(method.words, *wanted) if room else RoomPlan(dense=False)
        step, times = Step(self.number, plan), _Times(dense=plan.dense)
        world = self.n_messages if isinstance(method, Gather) else self.world_size
        self.times.append(times)
        for layout, state, gradient, moment in zip(self.layouts, self.states, gradients, moments, strict=True):
            rooms = self.capacity.of(layout, plan) if room else ()
            context = Context(layout, self.number, rooms, None, world, plan.dense, density=plan.density)
            grad = gradient if lean else gradient.clone()
            out = grad if isinstance(method, Sum) else torch.empty_like(grad)
            part = Part(step, method, state, context, grad, moment, out)
            self._bucket(part, times, lean)
            step.arrived(part)
        step.finish(self.capacity)
        self.number += 1

    def cost(self, last: int) -> Cost:
        """From the last steps, so many. Bytes are means of all of them, times of those that are not dense, if any.

        The hand-over to the courier's thread is left out: 0.02 ms a bucket on two busy cores of an EPYC.
        """
        times, n_buckets, n_messages = self.times[-last:], len(self.layouts), self.n_messages
        counted = [one for one in times if not one.dense] or times
        encode_ms, decode_ms, one_ms = (
            usual(getattr(one, name) for one in counted) for name in ("encode", "decode", "decode_one")
        )
        numel = sum(layout.numel for layout in self.layouts)
        fixed_ms = min(self._alone_ms(last), encode_ms / n_buckets)
        message_ms = 0.0
        if n_messages > 1:
            message_ms = min(max(0.0, (decode_ms - one_ms) / (n_messages - 1)), decode_ms / n_messages)
        head = FIXED * WORD_BYTES if self.compressor.kind == "gather" else 0
        n_bytes = statistics.mean(one.n_bytes for one in times)
        return Cost(
            spec=to_spec(self.compressor),
            kind=self.compressor.kind,
            bytes_per_element=(n_bytes - head * n_buckets) / numel,
            head_bytes=head,
            encode_ns=(encode_ms - fixed_ms * n_buckets) * NS_PER_MS / numel,
            decode_ns=(decode_ms - message_ms * n_messages) * NS_PER_MS / numel,
            decode_message_ns=message_ms * NS_PER_MS / numel,
            overhead_ms=fixed_ms,
            moments=1.0,
            rounds=max(1, round(statistics.mean(one.rounds for one in times) / n_buckets)),
            room=self.compressor.needs_room,
        )

    def _alone_ms(self, n_steps: int) -> float:
        """Of every bucket: the least that a tiny one took, as a busy moment would hide what an element costs."""
        tiny = Dry(self.compressor, [Layout.of([("tiny", (TINY,))])], self.world_size, self.device)
        noise = [torch.linspace(-1, 1, TINY, device=self.device)]
        for _ in range(SETTLE + n_steps):
            tiny.step(noise, noise)
        return min(times.encode for times in tiny.times[-n_steps:])

    def _bucket(self, part: Part, times: _Times, lean: bool) -> None:
        begin, talk = self._now(), exchange(part)
        ask: Ask | None = next(talk)
        times.encode += self._now() - begin
        while ask is not None:
            times.rounds += 1
            times.n_bytes += ask.n_bytes
            answer = self._answer(part, ask)
            if answer.messages is not None and not lean:
                times.decode_one += self._decode_one(part, answer.messages[:1].contiguous())
            begin = self._now()
            ask = answered(talk, answer)
            times.decode += self._now() - begin
        if part.arrival is not None and part.arrival.passed is not None:
            part.arrival.passed = torch.tensor(self.largest(part.arrival.passed.tolist()), dtype=torch.int32)

    def _answer(self, part: Part, ask: Ask) -> Answer:
        """As if all workers had sent what this one has."""
        messages, total = None, ask.summand
        if ask.message is not None:
            gathered = self.gather(ask.message)
            messages = ask.message.expand(self.n_messages, -1).contiguous() if gathered is None else gathered
        elif total is not None and isinstance(part.method, Rounds):
            total.mul_(self.world_size)
            self.meet(part.context.layout.numel)
        return Answer(messages, total)

    def _decode_one(self, part: Part, message: Tensor) -> float:
        """ms of one message alone."""
        assert isinstance(part.method, Gather)
        begin = self._now()
        part.method.decode(message, torch.empty_like(part.out), replace(part.context, world_size=1))
        return self._now() - begin

    def _now(self) -> float:
        """ms, when the device has done all it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * time.perf_counter()

"""Steps over a process group: the buckets of one model on the courier's thread, and what a bad step undoes."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import GradwireError
from gradwire.exchange.budget import Budget
from gradwire.exchange.counting import Lap, Mark, Meter
from gradwire.exchange.courier import Courier, Flight
from gradwire.exchange.room import Capacity
from gradwire.exchange.step import Answer, Ask, Part, Step, Talk, answered, exchange
from gradwire.layout import Layout
from gradwire.methods.base import Compressor, Context, Gather, State


@dataclass
class Bucket:
    """The flat tensors of one bucket: the compressor's state and the second moment of the step under way."""

    layout: Layout
    state: State
    moment: Tensor


@dataclass
class Job:
    """One bucket to be exchanged: DDP's flat gradient goes in, the mean over the ranks comes back in its place."""

    bucket: Bucket
    buffer: Tensor
    active: Tensor | None
    scale: Tensor | None  # of a GradScaler: r and v are kept in units of 1
    ready: torch.cuda.Event | None
    future: Future[Tensor]
    n_sent: int = 0  # bytes handed to the collectives
    n_received: int = 0
    laps: list[Lap] = field(default_factory=list)


@dataclass
class Backward(Step):
    """The step of one synced backward. Its futures are resolved together, after its last bucket."""

    tensors_left: int = 0  # of the model: DDP's own word for the last bucket is wrong in a static graph's first step
    budget: Budget | None = None  # where the ranks gather how long their steps take
    jobs: list[Job] = field(default_factory=list)
    done: bool = False


class Pipeline:
    """Runs the buckets of one model in order, each encoded while those before it travel; nothing here knows DDP."""

    def __init__(self, courier: Courier, meter: Meter, room: Capacity, end_step: Callable[[bool], None]) -> None:
        self._courier, self._meter, self._room, self._end_step = courier, meter, room, end_step
        self._error: BaseException | None = None
        self._warned = False
        self._stream: torch.cuda.Stream | None = None

    def submit(self, method: Compressor, step: Backward, job: Job) -> None:
        """Queues a bucket; its future is resolved after the step's last one."""

        def send() -> None:
            step.jobs.append(job)
            self._do(step, job, lambda: self._send(method, step, job))

        self._courier.submit(send)

    def _send(self, method: Compressor, step: Backward, job: Job) -> None:
        """Encodes and begins to send; what follows is work behind the buckets that are ready by now."""
        if step.budget is not None:
            step.budget.ask(self._courier, job.buffer.device)
        begin = _mark(job)
        part = self._part(method, step, job)
        talk = exchange(part)
        ask = next(talk)
        job.laps.append(("encode", begin, _mark(job)))
        flights = self._begin(job, ask)
        if isinstance(method, Gather):
            self._courier.submit(lambda: self._do(step, job, lambda: self._receive(step, job, part, talk, flights)))
        else:  # from beginning to end: all ranks must begin the later sums of a bucket in the same order too
            self._receive(step, job, part, talk, flights)

    def _part(self, method: Compressor, step: Backward, job: Job) -> Part:
        """Gradient and moment in float32 and units of 1: g / S and m / S^2."""
        bucket, plan, courier = job.bucket, step.plan, self._courier
        capacity = self._room.of(bucket.layout, plan) if method.needs_room else ()
        context = Context(
            bucket.layout, step.number, capacity, job.active, courier.world_size, plan.dense, courier.rank, plan.density
        )
        grad, moment = job.buffer.float(), bucket.moment
        if job.scale is not None:
            grad, moment = grad / job.scale, moment / job.scale / job.scale
        out = job.buffer if job.buffer.dtype == torch.float32 else torch.empty_like(grad)
        return Part(step, method, bucket.state, context, grad, moment, out)

    def _begin(self, job: Job, ask: Ask) -> tuple[Flight | None, Flight | None]:
        """Begins what was asked for, and counts its bytes."""
        gathered = summed = None
        if ask.message is not None:
            gathered = self._courier.gather(ask.message)
            job.n_sent += ask.message.nbytes
            job.n_received += ask.message.nbytes * (self._courier.world_size - 1)
        if ask.summand is not None:
            summed = self._courier.sum(ask.summand)
            job.n_sent += ask.summand.nbytes
            job.n_received += ask.summand.nbytes
        return gathered, summed

    def _receive(
        self, step: Backward, job: Job, part: Part, talk: Talk, flights: tuple[Flight | None, Flight | None]
    ) -> None:
        """Answers until nothing more is asked: the mean is in DDP's buffer."""
        ask: Ask | None = None
        while True:
            begin = _mark(job)
            answer = Answer(*[None if flight is None else flight.wait() for flight in flights])
            there = _mark(job)
            ask = answered(talk, answer)
            if ask is None:
                job.buffer.copy_(part.out if job.scale is None else part.out.mul_(job.scale))
            job.laps += [("exchange", begin, there), ("decode", there, _mark(job))]
            if ask is None:
                break
            flights = self._begin(job, ask)
        self._meter.bucket(part.context.layout, (job.n_sent, job.n_received, job.buffer.nbytes), part.counts, job.laps)
        step.arrived(part)
        step.tensors_left -= len(part.context.layout.slots)
        if step.tensors_left == 0:
            self._finish(step)

    def _finish(self, step: Backward) -> None:
        """Commits the step or takes it back, then lets DDP have the buckets."""
        finite = step.finish(self._room)
        if not finite:
            for job in step.jobs:
                job.buffer.fill_(float("nan"))
            if not self._warned and not step.may_be_skipped:
                warnings.warn(
                    f"gradwire: a gradient of step {step.number} is not finite on some rank; every rank gets NaN, as "
                    "in plain DDP. With mixed precision pass the GradScaler: attach(..., scaler=scaler).",
                    stacklevel=1,
                )
                self._warned = True
        if step.budget is not None:
            step.budget.hear()
        self._meter.end_step(step.plan.dense)
        step.done = True
        self._end_step(finite)
        for job in step.jobs:
            job.future.set_result(job.buffer)
        step.jobs.clear()

    # ---- what goes wrong

    def _do(self, step: Backward, job: Job, piece: Callable[[], None]) -> None:
        try:
            if self._error is not None:
                raise RuntimeError(f"an earlier exchange failed: {_in_words(self._error)}") from self._error
            with self._on_stream(job):
                piece()
        except BaseException as error:  # nobody waits for this thread: the futures carry the error to the backward
            self._fail(step, error)

    def _fail(self, step: Backward, error: BaseException) -> None:
        """Takes back what this step sent and hands the error to every future of it, now and later.

        Whatever goes wrong on the way: a future that is never resolved is a backward that waits for ever.
        """
        if self._error is None:
            self._error = error
            if not step.done:
                try:
                    step.take_back()
                except BaseException as second:
                    error = self._error = GradwireError(f"{_in_words(error)}. {_in_words(second)}")
        for job in step.jobs:
            _hand(job.future, error)

    def abandon(self, step: Backward) -> None:
        """Takes back a step that nobody will finish, after what of it is on its way."""
        taken_back = threading.Event()

        def fail() -> None:
            self._fail(step, GradwireError("this step was given up: its net was wrapped and attached anew"))
            taken_back.set()

        # what is still to be sent queues what receives it: the other ranks wait for both, and `fail` goes behind them
        self._courier.submit(lambda: self._courier.submit(fail))
        taken_back.wait()

    @contextlib.contextmanager
    def _on_stream(self, job: Job) -> Iterator[None]:
        """On a GPU: a stream beside the backward's, after the bucket is ready; the future records it."""
        if job.ready is None:
            yield
            return
        device = job.buffer.device
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            job.buffer.record_stream(self._stream)
            yield


def _in_words(error: BaseException) -> str:
    """Also of one whose own words fail."""
    return str(error) if isinstance(error, GradwireError) else traceback.format_exception_only(error)[-1].strip()


def _hand(future: Future[Any], error: BaseException) -> None:
    """The error to who waits; in words alone if torch does not take it, as one that is no Exception."""
    for taken in (error, GradwireError(_in_words(error))):
        if not future.done():
            with contextlib.suppress(BaseException):
                future.set_exception(taken)


def _mark(job: Job) -> Mark:
    """Now: on the host, and where the stream stands on a GPU."""
    event = None
    if job.ready is not None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    return Mark(time.perf_counter(), event)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """On a GPU: marks where the backward's stream stands now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event

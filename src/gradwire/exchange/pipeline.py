"""Steps 2 to 6 of one model on the courier's thread: encode, exchange, decode, and what a bad step undoes."""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.codec.header import WORD_BYTES
from gradwire.errors import GradwireError
from gradwire.exchange.counting import Meter
from gradwire.exchange.courier import Courier
from gradwire.exchange.room import Capacity
from gradwire.exchange.step import Parcel, Sent, Step
from gradwire.methods.base import (
    Arrival,
    Compressor,
    Context,
    Gather,
    Rounds,
    State,
    said_by,
    tensors,
)


class Delivery:
    """Runs the parcels of one model in order; nothing here knows DDP."""

    def __init__(self, courier: Courier, meter: Meter, capacity: Capacity, end_step: Callable[[bool], None]) -> None:
        self._courier, self._meter, self._capacity, self._end_step = courier, meter, capacity, end_step
        self._error: BaseException | None = None
        self._warned = False
        self._stream: torch.cuda.Stream | None = None

    def submit(self, compressor: Compressor, step: Step, parcel: Parcel) -> None:
        """Queues a parcel; its future is resolved after the step's last one."""
        self._courier.submit(lambda: self._work(compressor, step, parcel))

    def beside(self, step: Step, n_tensors: int, summed: Future[Tensor]) -> Future[Tensor]:
        """Tensors of a step that are summed without the courier: resolved with the step all the same."""
        done: Future[bool] = Future()
        step.beside.append(done)

        def count() -> None:
            step.tensors_left -= n_tensors
            if step.tensors_left == 0:
                self._finish(step)

        self._courier.submit(lambda: self._guarded(step, count))

        def resolve(done: Future[bool]) -> Tensor:
            finite = done.wait()  # raises what the step did
            return summed.wait() if finite else summed.wait().fill_(float("nan"))

        return done.then(resolve)

    def _work(self, compressor: Compressor, step: Step, parcel: Parcel) -> None:
        """Encodes and sends; what follows is work behind the buckets that are ready by now."""
        step.parcels.append(parcel)

        def send() -> None:
            if isinstance(compressor, Rounds):
                # from beginning to end: all ranks must begin the later sums of a bucket in the same order too
                self._converse(compressor, step, parcel)
                self._arrived(step, parcel)
                return
            assert isinstance(compressor, Gather)
            sent = self._send(compressor, step, parcel)
            self._courier.submit(lambda: self._do(step, parcel, lambda: self._arrive(step, sent)))

        self._do(step, parcel, send)

    def _do(self, step: Step, parcel: Parcel, piece: Callable[[], None]) -> None:
        def on_stream() -> None:
            with self._on_stream(parcel):
                piece()

        self._guarded(step, on_stream)

    def _guarded(self, step: Step, piece: Callable[[], None]) -> None:
        try:
            if self._error is not None:
                raise RuntimeError(f"an earlier exchange failed: {_in_words(self._error)}") from self._error
            piece()
        except BaseException as error:  # nobody waits for this thread: the futures carry the error to the backward
            self._fail(step, error)

    def _arrive(self, step: Step, sent: Sent) -> None:
        self._receive(step, sent)
        self._arrived(step, sent.parcel)

    def _arrived(self, step: Step, parcel: Parcel) -> None:
        step.tensors_left -= len(parcel.bucket.layout)
        if step.tensors_left == 0:
            self._finish(step)

    def _context(self, compressor: Compressor, step: Step, parcel: Parcel) -> Context:
        layout = parcel.bucket.layout
        capacity = self._capacity.of(layout, step.plan) if compressor.needs_room else ()
        courier, dense = self._courier, step.plan.dense
        common = (layout, step.number, capacity, parcel.active, courier.world_size, dense, courier.rank)
        return Context(*common, density=step.plan.density)

    def _send(self, compressor: Gather, step: Step, parcel: Parcel) -> Sent:
        layout, state, context = parcel.bucket.layout, parcel.bucket.state, self._context(compressor, step, parcel)
        if step.budget is not None:
            step.budget.ask(self._courier, parcel.buffer.device)
        with self._meter.phase("encode"):
            message = compressor.encode(*parcel.unscaled(), state, context)
            step.undo.append(message.undo)
            whole = compressor.waiting(state, context) if step.plan.dense else None
            if whole is not None and parcel.scale is not None:
                step.undo.append(_snapshot(state))  # a GradScaler may yet skip the optimizer's step
        flight = self._courier.gather(message.data)
        if whole is None:
            self._meter.elements(layout, message.sent, message.passed, message.sent_norm)
            return Sent(compressor, parcel, context, message.data, flight)
        self._meter.everything(layout, whole.abs().sum())
        summed = self._courier.sum(whole.mul_(1 / self._courier.world_size))
        return Sent(compressor, parcel, context, message.data, flight, summed)

    def _receive(self, step: Step, sent: Sent) -> None:
        compressor, parcel, context = sent.compressor, sent.parcel, sent.context
        with self._meter.phase("exchange"):
            messages = sent.flight.wait()
            whole = None if sent.summed is None else sent.summed.wait()
        with self._meter.phase("decode"):
            out = torch.empty_like(parcel.bucket.moment) if parcel.buffer.dtype != torch.float32 else parcel.buffer
            arrival = compressor.decode(messages, out, context)
            if whole is not None:
                out.copy_(whole)
                step.clear.append(lambda: compressor.clear(parcel.bucket.state, context))
            parcel.buffer.copy_(out if parcel.scale is None else out.mul_(parcel.scale))
        step.arrivals.append((context.layout, arrival))
        self._count(parcel, sent.data, whole is not None)

    def _converse(self, compressor: Rounds, step: Step, parcel: Parcel) -> None:
        """All sums of one bucket; in a dense step one, of everything."""
        state, context = parcel.bucket.state, self._context(compressor, step, parcel)
        rounds = compressor.everything if context.dense else compressor.rounds
        n_bytes = 0
        with self._meter.phase("encode"):
            talk = rounds(parcel.unscaled()[0], state, context)
            said = said_by(talk, None)
        while isinstance(said, Tensor):
            n_bytes += said.numel() * said.element_size()
            with self._meter.phase("exchange"):
                total = self._courier.sum(said).wait()
            with self._meter.phase("decode"):
                said = said_by(talk, total)
        outcome = said
        if context.dense:
            step.clear.append(lambda: compressor.clear(state, context))
            if parcel.scale is not None:  # a GradScaler may yet skip the optimizer's step: r as it is, then g to it
                step.undo.append(_snapshot(state))
        step.undo.append(outcome.undo)
        with self._meter.phase("decode"):
            mean = outcome.mean
            parcel.buffer.copy_(mean if parcel.scale is None else mean.mul_(parcel.scale))
        self._meter.elements(context.layout, outcome.sent, None, outcome.sent_norm)
        self._meter.count(n_bytes, n_bytes, parcel.buffer.numel() * parcel.buffer.element_size())
        step.arrivals.append((context.layout, Arrival(outcome.finite, None, torch.zeros_like(outcome.finite), _fine)))

    def _count(self, parcel: Parcel, data: Tensor, whole: bool) -> None:
        n_message = data.numel() * WORD_BYTES
        n_whole = parcel.bucket.layout.numel * WORD_BYTES if whole else 0
        n_dense = parcel.buffer.numel() * parcel.buffer.element_size()
        self._meter.count(n_message + n_whole, n_message * (self._courier.world_size - 1) + n_whole, n_dense)

    def _finish(self, step: Step) -> None:
        """Commits the step or takes it back, then lets DDP have the buckets."""
        finite, counts = step.read()
        step.arrivals.clear()  # with the messages that they hold
        if finite:
            for change in step.clear:
                change()
            if step.parcels[0].scale is None:  # only a GradScaler may yet leave the optimizer's step out
                step.undo.clear()
            for layout, passed in counts:
                self._capacity.note(layout, passed)
            if counts:
                self._capacity.end_step(step.plan)
        else:
            step.take_back()
            for parcel in step.parcels:
                parcel.buffer.fill_(float("nan"))
            if not self._warned and step.parcels[0].scale is None:
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
        for parcel in step.parcels:
            parcel.future.set_result(parcel.buffer)
        for future in step.beside:
            future.set_result(finite)
        step.parcels.clear()

    def _fail(self, step: Step, error: BaseException) -> None:
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
        for future in step.futures:
            _hand(future, error)

    def abandon(self, step: Step) -> None:
        """Takes back a step that nobody will finish, after what of it is on its way."""
        taken_back = threading.Event()

        def fail() -> None:
            self._fail(step, GradwireError("this step was given up: its net was wrapped and attached anew"))
            taken_back.set()

        # what is still to be sent queues what receives it: the other ranks wait for both, and `fail` goes behind them
        self._courier.submit(lambda: self._courier.submit(fail))
        taken_back.wait()

    @contextlib.contextmanager
    def _on_stream(self, parcel: Parcel) -> Iterator[None]:
        """On a GPU: a stream beside the backward's, after the bucket is ready; the future records it."""
        if parcel.ready is None:
            yield
            return
        device = parcel.buffer.device
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(parcel.ready)
            parcel.buffer.record_stream(self._stream)
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


def _fine() -> None:
    """Of sums, which torch checks."""


def _snapshot(state: State) -> Callable[[], None]:
    """Puts a whole state back as it is now."""
    now = [tensor.clone() for tensor in tensors(state)]

    def put_back() -> None:
        for tensor, before in zip(tensors(state), now, strict=True):
            tensor.copy_(before)

    return put_back

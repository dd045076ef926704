"""When something goes wrong on the courier's thread no rank waits for the timeout, whatever it is."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC, Dense
from gradwire.adapters import reducer as link_module
from workers import Workers

TIMEOUT, SOON = 40, 10  # seconds, of the group and of an error


class Stop(BaseException):
    """As SystemExit is, and what Ctrl-C raises: no Exception."""


class WordlessError(Exception):
    """Also what it says fails."""

    def __str__(self) -> str:
        raise ValueError


def attached() -> tuple[DistributedDataParallel, Any]:
    """After some steps, a bucket a parameter."""
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, Dense())
    list(scenes.train(model, range(2), scenes.sgd(model)))
    wire.compressor = VGC(alpha=1.0)
    list(scenes.train(model, range(2, 4), scenes.sgd(model)))
    return model, wire


def spoiled_message(pipeline: Any) -> None:
    """The last rank's third message arrives changed."""
    gather, calls = pipeline._courier.gather, []

    def spoiled(message: torch.Tensor) -> Any:
        flight = gather(message)
        calls.append(1)
        if len(calls) == 3:
            flight.wait()[-1, -1] ^= 4
        return flight

    pipeline._courier.gather = spoiled


def broken_undo(pipeline: Any) -> None:
    """And what was sent cannot be taken back."""
    spoiled_message(pipeline)
    send = pipeline._send

    def sent(method: Any, step: Any, job: Any) -> Any:
        step.undo.append(fails)
        return send(method, step, job)

    pipeline._send = sent


def not_finite(pipeline: Any) -> None:
    """A gradient, so that the step is taken back without an error: and it cannot be."""
    send = pipeline._send

    def sent(method: Any, step: Any, job: Any) -> Any:
        job.buffer[0] = torch.nan
        step.undo.append(fails)
        return send(method, step, job)

    pipeline._send = sent


def fails() -> None:
    raise ZeroDivisionError("no way back")


def stopped(pipeline: Any) -> None:
    """No Exception, in the third bucket to be encoded."""
    send, calls = pipeline._send, []

    def sent(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Stop("pressed")
        return send(*args)

    pipeline._send = sent


def wordless(pipeline: Any) -> None:
    """At the end of the step: no other bucket comes."""

    def finish(step: Any) -> None:
        raise WordlessError

    pipeline._finish = finish


def broken_future(pipeline: Any) -> None:
    """The second future of the step does not take its result."""
    calls = []

    class Future(torch.futures.Future):
        def set_result(self, result: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("full")
            super().set_result(result)

    link_module.Future = Future  # type: ignore[misc]


CORRUPT = "is corrupt: its checksum does not match"
LOST = "what this step had sent could not be taken back (ZeroDivisionError: no way back), so what is held back is not"
FAULTS = {
    "spoiled": (spoiled_message, CORRUPT),
    "undo": (broken_undo, f"{CORRUPT}. {LOST}"),
    "not finite": (not_finite, LOST),
    "stop": (stopped, "Stop: pressed"),
    "wordless": (wordless, "WordlessError"),
    "future": (broken_future, "full"),
}


def after(fault: str) -> tuple[list[str], float, bool]:
    """What the step with the fault and the next one say, how long that takes, whether the courier is still there."""
    spoil, _ = FAULTS[fault]
    model, wire = attached()
    spoil(wire._reducer._pipeline)
    begin, messages = time.monotonic(), []
    for step in range(2):
        x, y = scenes.batch(step)
        try:
            nn.functional.cross_entropy(model(x), y).backward()
            messages.append("no error")
        except RuntimeError as error:
            messages.append(str(error))
    alive = any(thread.name == "gradwire-courier" for thread in threading.enumerate())
    return messages, time.monotonic() - begin, alive


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_hears_of_it_at_once(fault: str) -> None:
    workers = Workers(2, timeout=TIMEOUT)
    try:
        heard = workers.run(after, fault)
        assert any(FAULTS[fault][1] in messages[0] for messages, _, _ in heard)
        for messages, seconds, alive in heard:
            # what the other one still had on its way when it failed may be heard of first, as a connection that closed
            assert FAULTS[fault][1] in messages[0] or "gloo" in messages[0]
            assert messages[1] != "no error"
            assert seconds < SOON
            assert alive
    finally:
        workers.close()

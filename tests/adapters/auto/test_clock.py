"""What a step takes without its exchange, from when its buckets were ready."""

from __future__ import annotations

import pytest

from gradwire.adapters.auto.step_clock import Clock
from gradwire.layout import Layout


def layout(numel: int) -> Layout:
    return Layout.of([(f"of {numel}", (numel,))])


class Time:
    """Seconds that somebody sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, time: Time, begin: float, wait: float = 0.0) -> None:
    """A step: 10 ms forward, 40 ms backward with buckets of 100 and 300 elements, `wait` for the sums, 5 ms after."""
    time.now = begin + 0.010 + 0.25 * 0.040
    clock.ready(layout(100))
    time.now = begin + 0.010 + 0.040
    clock.ready(layout(300))
    time.now += wait
    clock.arrived()
    time.now += 0.005
    clock.stepped()


def after(waits: tuple[float, ...], keep: int) -> Clock:
    """A clock that has seen steps with these waits, and an end before the first."""
    time = Time()
    clock = Clock(keep=keep, now=time)
    clock.stepped()
    for wait in waits:
        run(clock, time, time.now, wait)
    return clock


def test_the_parts_are_those_of_a_plain_step_whatever_the_exchange_takes():
    clock = after((0.0, 0.1, 0.2), keep=5)
    assert clock.layouts() == [layout(100), layout(300)]
    assert clock.parts() == pytest.approx((10, 40, 5))
    assert clock.step_ms() == pytest.approx(105)  # 55 and 155: not the longest
    assert clock.recent_ms() == pytest.approx((155, 255))


def test_the_first_step_and_the_one_after_a_switch_do_not_count():
    time = Time()
    clock = Clock(keep=5, now=time)
    run(clock, time, time.now)
    assert len(clock._steps) == 0
    run(clock, time, time.now)
    assert len(clock._steps) == 1
    clock.forget()
    run(clock, time, time.now, wait=9.0)
    assert len(clock._steps) == 0


def test_one_bucket_leaves_no_backward_to_overlap_with():
    time = Time()
    clock = Clock(keep=5, now=time)
    clock.stepped()
    begin = time.now
    time.now = begin + 0.030
    clock.ready(layout(7))
    clock.arrived()
    time.now += 0.001
    clock.stepped()
    assert clock.parts() == pytest.approx((30, 0, 1))


def test_only_so_many_steps_are_kept():
    clock = after((5.0, 0.0, 0.0), keep=2)
    assert len(clock._steps) == 2
    assert clock.step_ms() == pytest.approx(55)

"""Links have the rates that were asked for: alone, in both directions, by host, and after a change."""

from __future__ import annotations

import time

import pytest
from transfers import PAYLOAD, PAYLOAD_BOTH_WAYS, begin, needs_namespaces, reached, seconds

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab
from gradwire.tools.lab.rates import Link

pytestmark = [needs_namespaces, pytest.mark.alone]

SHORT = 0.95  # of the rate less framing
LONG = 1.02  # the bucket is full when a transfer begins


@pytest.mark.parametrize(("mbit", "n_bytes"), [(1, 150_000), (10, 1_500_000), (100, 10_000_000), (1000, 50_000_000)])
def test_a_transfer_has_the_links_rate(mbit, n_bytes):
    least = (0.8 if mbit == 1000 else SHORT) * mbit * PAYLOAD  # at 1000 both processes need a core of their own
    with Lab(hosts=2, rate=mbit) as lab:
        (alone,) = reached(lab, [(0, 1)], n_bytes, least)
    assert least <= alone <= LONG * mbit * PAYLOAD


@pytest.mark.parametrize(("mbit", "n_bytes"), [(10, 2_000_000), (100, 15_000_000)])
def test_both_directions_at_once_have_the_links_rate(mbit, n_bytes):
    least = SHORT * mbit * PAYLOAD_BOTH_WAYS
    with Lab(hosts=3, rate=mbit) as lab:
        speeds = reached(lab, [(0, 1), (1, 2), (2, 0)], n_bytes, least)
    assert min(speeds) >= least
    assert max(speeds) <= LONG * mbit * PAYLOAD  # the last to end has the link to itself for a moment


def test_time_of_a_transfer_over_10_mbit():
    """By our own clock: what 1 MB and its headers take longer than over an unlimited link."""
    n_bytes = 1_000_000
    with Lab(hosts=2, rate="10Mbit") as lab:
        shaped = seconds(lab, 0, 1, n_bytes)
        lab.set_rate(0, "unlimited")
        lab.set_rate(1, "unlimited")
        unlimited = seconds(lab, 0, 1, n_bytes)
    expected = n_bytes * 8e-7 / PAYLOAD
    assert shaped >= 0.97 * expected
    assert shaped - unlimited == pytest.approx(expected, rel=0.3)  # starting two processes takes now more, now less


def test_every_host_has_its_own_rate():
    with Lab(hosts=3, rate=["unlimited", "40Mbit/10Mbit", 20]) as lab:
        assert lab.links == [Link(None, None), Link(40, 10), Link(20, 20)]
        for way, mbit in [((0, 1), 10), ((1, 0), 40), ((0, 2), 20), ((1, 2), 20)]:
            least = SHORT * mbit * PAYLOAD
            (speed,) = reached(lab, [way], mbit * 50_000, least)
            assert least <= speed <= LONG * mbit * PAYLOAD


def settles(lab: Lab, host: int, mbit: float) -> bool:
    """Whether a host's interface soon receives at this rate; TCP and a busy machine need a moment."""
    for _ in range(6):
        before, start = lab.counters(host), time.monotonic()
        time.sleep(0.4)
        after, end = lab.counters(host), time.monotonic()
        speed = (after - before).bytes_received * 8e-6 / (end - start)
        if speed == pytest.approx(mbit, rel=0.06):
            return True
    return False


def test_a_rate_is_changed_under_a_transfer():
    n_bytes = 150_000_000  # at 100 Mbit/s 12 seconds
    with Lab(hosts=2, rate=50) as lab:
        running = begin(lab, 0, 1, n_bytes)
        assert settles(lab, 1, 50)
        lab.set_rate(1, "10Mbit")  # the receiver's
        assert settles(lab, 1, 10)
        lab.set_rate(1, 1000)
        lab.set_rate(0, "100Mbit")
        assert settles(lab, 1, 100)
        assert running.poll() is None
        lab.set_rate(0, "unlimited")
        running.communicate(timeout=20)
        assert lab.counters(1).bytes_received > n_bytes
        with pytest.raises(InputError, match="not possible"):
            lab.set_rate(0, 0)
        assert lab.links == [Link(None, None), Link(1000, 1000)]


def test_an_idle_lab_sends_nothing():
    """No IPv6, no spanning tree: what the counters show, programs have sent."""
    with Lab(hosts=2, rate=10) as lab:
        time.sleep(1)
        assert [vars(lab.counters(host)) for host in range(2)] == [
            {"bytes_sent": 0, "packets_sent": 0, "bytes_received": 0, "packets_received": 0}
        ] * 2

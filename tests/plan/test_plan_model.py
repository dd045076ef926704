"""The cost model against closed forms, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.plan.model import Cost, Network, Work, predict

N = 1_000_000
FREE = Cost("dense", "sum", 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # costs nothing but its bytes
INSTANT = Work((N,), 0.0, 0.0, 0.0)


def gathered(ratio: float, **changes: float) -> Cost:
    return replace(FREE, spec="vgc", kind="gather", bytes_per_element=4 / ratio, **changes)


def test_a_dense_all_reduce_takes_what_the_closed_form_says():
    p, mbit = 16, 100.0
    beta = 1 / (mbit * 1e6)  # seconds a bit
    expected_ms = 1e3 * 2 * (p - 1) / p * N * 32 * beta
    found = predict(INSTANT, Network(p, mbit, 0.0), FREE)
    assert found.step_ms == pytest.approx(expected_ms)
    assert (found.exchange_ms, found.wire_ms) == (found.step_ms, found.step_ms)
    assert found.bytes_on_link == pytest.approx(2 * (p - 1) / p * N * 4)


def test_gathered_messages_take_what_the_closed_form_says():
    p, ratio, network = 16, 1000, Network(16, 100.0, 0.0)
    dense, sparse = (predict(INSTANT, network, cost).step_ms for cost in (FREE, gathered(ratio)))
    assert sparse == pytest.approx(1e3 * (p - 1) * N * 32 / ratio / 100e6)
    assert dense / sparse == pytest.approx(2 * ratio / p)
    # the bound of the paper counts p messages on a link where a ring has p - 1
    assert dense / (sparse * p / (p - 1)) == pytest.approx(2 * (p - 1) * ratio / p**2)
    assert round(dense / (sparse * p / (p - 1))) == 117


@pytest.mark.parametrize("p", [2, 4, 16, 256])
def test_messages_pay_from_a_ratio_of_half_the_workers(p):
    network = Network(p, 10.0, 0.0)
    dense = predict(INSTANT, network, FREE).step_ms
    assert predict(INSTANT, network, gathered(1.01 * p / 2)).step_ms < dense
    assert predict(INSTANT, network, gathered(0.99 * p / 2)).step_ms > dense


def test_hops_cost_latency():
    network = Network(5, math.inf, 2.0)
    assert predict(INSTANT, network, FREE).step_ms == 2 * 4 * 2.0
    assert predict(INSTANT, network, gathered(10)).step_ms == 4 * 2.0
    assert predict(INSTANT, network, replace(FREE, kind="rounds", rounds=3)).step_ms == 3 * 2 * 4 * 2.0


def test_a_measured_curve_is_followed():
    """10 Mbit/s, 3 workers: 2/3 and 2 times the bytes of a worker pass a link."""
    curve = ((1_000.0, 1.0, 2.0), (100_000.0, 0.25, 2.0))
    plain, measured = Network(3, 10.0, 1.0), Network(3, 10.0, 1.0, curve)
    for n_bytes, summed in ((10, 1.0), (1_000, 1.0), (10_000, 0.5), (100_000, 0.25)):
        assert measured.collective_ms(n_bytes, False) == pytest.approx(summed * plain.collective_ms(n_bytes, False))
        assert measured.collective_ms(n_bytes, True) == pytest.approx(2 * plain.collective_ms(n_bytes, True))
    # beyond it: as between the two largest, 0.25 x 84 - 4.8 ms for 79.2 ms of bytes, but never less than half of them
    more = measured.collective_ms(1_100_000, False) - measured.collective_ms(100_000, False)
    assert more == pytest.approx(0.5 * 800)
    gathered = measured.collective_ms(1_100_000, True) - measured.collective_ms(100_000, True)
    assert gathered == pytest.approx(2 * 800)
    dense = predict(INSTANT, measured, FREE)
    assert dense.bytes_on_link == predict(INSTANT, plain, FREE).bytes_on_link
    # the sums of a method are smaller than all its bytes: 4 of 10,000 bytes on the link take half as long each
    rounds = replace(FREE, kind="rounds", rounds=4, bytes_per_element=0.03)
    assert predict(INSTANT, plain, rounds).wire_ms == pytest.approx(4 * (10_000 * 8 / 10 / 1e3 + 4))
    assert predict(INSTANT, measured, rounds).wire_ms == pytest.approx(0.5 * 4 * (10_000 * 8 / 10 / 1e3 + 4))
    assert predict(INSTANT, Network(1, 10.0, 1.0, curve), FREE).step_ms == 0.0


def test_without_a_backward_nothing_overlaps():
    work, network = Work((N, N, N), 5.0, 0.0, 7.0), Network(4, 100.0, 0.0)
    found = predict(work, network, FREE)
    assert found.step_ms == pytest.approx(5 + found.wire_ms + 7)


def test_a_backward_hides_all_but_the_last_bucket():
    work = Work((N, N, N, N), 10.0, 400.0, 3.0)
    network = Network(2, 32 * N / 1e6 / 0.05, 0.0)  # a bucket takes 50 ms
    assert predict(work, network, FREE).step_ms == pytest.approx(10 + 400 + 50 + 3)
    assert predict(work, network, FREE).exchange_ms == pytest.approx(300 + 50)
    slower = replace(network, mbit=network.mbit / 4)  # 200 ms: longer than the 100 ms between two buckets
    assert predict(work, slower, FREE).step_ms == pytest.approx(10 + 100 + 4 * 200 + 3)


def test_buckets_may_be_ready_at_other_times():
    late = Work((N, N), 0.0, 100.0, 0.0, ready=(1.0, 1.0))
    network = Network(2, 32 * N / 1e6 / 0.05, 0.0)
    assert predict(late, network, FREE).step_ms == pytest.approx(200)


def test_the_courier_encodes_while_messages_travel():
    """Two buckets, ready at 50 and 100 ms: 10 ms to encode, 40 to travel, 8 to decode."""
    work, network = Work((N, N), 0.0, 100.0, 0.0), Network(2, 32 * N / 1e6 / 0.04, 0.0)
    cost = gathered(1, encode_ns=10.0, decode_ns=8.0)
    # bucket 0: encoded 60, arrived 100, decoded 108; bucket 1: encoded 118, arrived 158, decoded 166
    assert predict(work, network, cost).step_ms == pytest.approx(166)
    # both ready at once: encoded 110 and 120, on the link 110 to 150 to 190
    both = replace(work, ready=(1.0, 1.0))
    assert predict(both, network, cost).step_ms == pytest.approx(100 + 10 + 40 + 40 + 8)


def test_sums_of_a_bucket_run_to_their_end_before_the_next():
    work, network = Work((N, N), 0.0, 0.0, 0.0), Network(2, 32 * N / 1e6 / 0.04, 0.0)
    cost = replace(FREE, kind="rounds", encode_ns=10.0, decode_ns=8.0)
    assert predict(work, network, cost).step_ms == pytest.approx(2 * (10 + 40 + 8))


def test_a_courier_on_the_backward_s_cores_holds_it_up():
    network, cost = Network(2, math.inf, 0.0), gathered(100, encode_ns=10.0)
    work = Work((N, N), 0.0, 100.0, 0.0)
    assert predict(work, network, cost).step_ms == pytest.approx(110)  # the last bucket's encoding
    assert predict(replace(work, beside=0.0), network, cost).step_ms == pytest.approx(120)


def test_a_cast_is_work_of_the_backward_s_thread():
    cost = replace(FREE, encode_ns=10.0, decode_ns=5.0)
    assert predict(Work((N, N), 0.0, 100.0, 0.0), Network(2, math.inf, 0.0), cost).step_ms == pytest.approx(125)


def test_second_moments_lengthen_forward_and_backward_alone():
    work = Work((N,), 20.0, 100.0, 30.0)
    assert predict(work, Network(2, math.inf, 0.0), gathered(1, moments=1.5)).step_ms == pytest.approx(180 + 30)


def test_decoding_grows_with_the_workers():
    cost = gathered(100, decode_ns=1.0, decode_message_ns=2.0)
    for workers in (2, 7):
        assert predict(INSTANT, Network(workers, math.inf, 0.0), cost).step_ms == pytest.approx(1 + 2 * workers)


def test_messages_that_need_room_cost_no_more_than_a_dense_step():
    network = Network(64, 10.0, 0.0)
    dense = predict(INSTANT, network, FREE)
    free, bound = (predict(INSTANT, network, gathered(8, room=room)) for room in (False, True))
    assert free.wire_ms == pytest.approx(4 * dense.wire_ms)
    assert bound.wire_ms == pytest.approx(dense.wire_ms)
    assert bound.bytes_on_link == pytest.approx(dense.bytes_on_link)


positive = st.floats(0, 1e3)
works = st.builds(
    Work,
    st.lists(st.integers(1, 10**8), min_size=1, max_size=6).map(tuple),
    positive,
    positive,
    positive,
    beside=st.floats(0, 1),
)
costs = st.builds(
    Cost,
    spec=st.just("x"),
    kind=st.sampled_from(["sum", "gather", "rounds"]),
    bytes_per_element=st.floats(0, 8),
    head_bytes=st.floats(0, 1e4),
    encode_ns=st.floats(0, 50),
    decode_ns=st.floats(0, 50),
    decode_message_ns=st.floats(0, 5),
    overhead_ms=st.floats(0, 10),
    moments=st.floats(1, 3),
    rounds=st.integers(1, 3),
    room=st.booleans(),
)
rates = st.floats(0.1, 1e6)


def slack(work: Work, network: Network, cost: Cost) -> float:
    """What the order of the courier's queue, which is that of arrival, may cost on a faster link."""
    if cost.kind != "gather":
        return 0.0
    free = predict(replace(work, forward_ms=0.0, backward_ms=0.0, after_ms=0.0), replace(network, mbit=math.inf), cost)
    return free.step_ms


@settings(max_examples=300, deadline=None)
@given(works, st.integers(1, 4096), rates, rates, st.floats(0, 10), costs)
def test_a_faster_link_is_never_slower(work, workers, one, other, latency, cost):
    slow, fast = (Network(workers, rate, latency) for rate in sorted((one, other)))
    longer, shorter = (predict(work, network, cost) for network in (slow, fast))
    assert shorter.wire_ms <= longer.wire_ms * (1 + 1e-9)
    assert shorter.step_ms <= longer.step_ms * (1 + 1e-9) + slack(work, fast, cost)
    at_once = replace(work, ready=(1.0,) * len(work.buckets))  # then no order depends on the link
    shorter_ms, longer_ms = (predict(at_once, network, cost).step_ms for network in (fast, slow))
    assert shorter_ms <= longer_ms * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(works, st.integers(1, 4096), st.integers(1, 4096), rates, st.floats(0, 10), costs)
def test_more_workers_are_never_faster(work, one, other, mbit, latency, cost):
    few, many = (Network(workers, mbit, latency) for workers in sorted((one, other)))
    assert predict(work, few, cost).wire_ms <= predict(work, many, cost).wire_ms * (1 + 1e-9)
    at_once = replace(work, ready=(1.0,) * len(work.buckets), beside=1.0)
    assert predict(at_once, few, cost).step_ms <= predict(at_once, many, cost).step_ms * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(works, st.integers(1, 64), rates, st.floats(0, 10), costs)
def test_a_step_is_never_shorter_than_its_parts(work, workers, mbit, latency, cost):
    found = predict(work, Network(workers, mbit, latency), cost)
    assert found.step_ms * (1 + 1e-9) >= work.compute_ms
    assert found.step_ms * (1 + 1e-9) >= found.wire_ms
    assert found.exchange_ms >= 0


def test_one_worker_sends_nothing():
    assert predict(INSTANT, Network(1, 1.0, 5.0), FREE).step_ms == 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Network(0, 1.0, 0.0), "at least 1 worker"),
        (lambda: Network(2, 0.0, 0.0), "more than 0 Mbit/s, not 0"),
        (lambda: Network(2, -5.0, 0.0), "more than 0 Mbit/s, not -5"),
        (lambda: Network(2, math.nan, 0.0), "more than 0 Mbit/s, not nan"),
        (lambda: Network(2, 1.0, math.nan), "latency must be 0 ms or more"),
        (lambda: Network(2, 1.0, -1.0), "latency must be 0 ms or more"),
    ],
)
def test_impossible_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()

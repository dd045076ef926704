"""Local steps in the cost model: against a simulation tick by tick, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.adapters.auto.method_chooser import MethodChooser
from gradwire.local_steps.error_feedback import ErrorFeedback, method_of
from gradwire.local_steps.recipe import recipe_of
from gradwire.methods.table import METHODS
from gradwire.plan.choose import CHANGED, Verdict, choose
from gradwire.plan.local_advice import advise
from gradwire.plan.local_costs import measured_local, typical_local
from gradwire.plan.model import Cost, Network, Prediction, Work, predict
from gradwire.plan.rounds import RoundCost
from gradwire.plan.typical import cost_of, work_of

INNER, BEGIN, ENCODE, DECODE, END = 100, 5, 20, 10, 7  # ticks, which the model has as ms
MILLION = 1_000_000  # elements of a fragment: a ns an element is a ms


def cost(local: RoundCost, kind: str = "gather") -> Cost:
    return Cost("local", kind, 1.0, 0.0, float(ENCODE), float(DECODE), 0.0, 0.0, 1.0, local=local)


def local(every: int, fragments: int = 1, delay: int = 0) -> RoundCost:
    return RoundCost(every, fragments, delay, float(BEGIN), float(END))


def found(steps: RoundCost, link: float, kind: str = "gather", beside: float = 1.0) -> Prediction:
    """Two workers, between whom a fragment takes `link` ms."""
    work = Work((steps.fragments * MILLION,), 0.2 * INNER, 0.5 * INNER, 0.3 * INNER, beside=beside)
    return predict(work, Network(2, 8000 / link, 0.0), cost(steps, kind))


class Ticks:
    """A training and a courier that go on tick by tick; written from the outer loop, not from the model."""

    def __init__(self, every: int, fragments: int, delay: int, link: int, shared: bool) -> None:
        self.every, self.fragments, self.delay, self.link, self.shared = every, fragments, delay, link, shared
        self.queue: deque[int] = deque()
        self.there: set[int] = set()
        self.ends: list[int] = []  # ticks at which a round was over
        self.tick = self.waited = 0
        self.waits: list[int] = []

    def training(self) -> Iterator[str]:
        step, due = 0, dict[int, int]()
        while True:
            yield from ["work"] * INNER
            step += 1
            for fragment in [one for one, wanted in due.items() if wanted <= step]:
                del due[fragment]
                yield from self.receive(fragment)
            places = [-(-(one + 1) * self.every // self.fragments) % self.every for one in range(self.fragments)]
            sent = [one for one, place in enumerate(places) if step % self.every == place]
            for fragment in sent:
                yield from ["work"] * BEGIN
                self.queue.append(fragment)
                due[fragment] = step + self.delay
            for fragment in sent if self.delay == 0 else ():
                del due[fragment]
                yield from self.receive(fragment)
            if step % self.every == 0:
                self.ends.append(self.tick)
                self.waits.append(self.waited)

    def receive(self, fragment: int) -> Iterator[str]:
        while fragment not in self.there:
            self.waited += 1
            yield "wait"
        self.there.remove(fragment)
        yield from ["work"] * END

    def courier(self) -> Iterator[str]:
        while True:
            while not self.queue:
                yield "idle"
            fragment = self.queue.popleft()
            yield from ["work"] * ENCODE + ["link"] * self.link + ["work"] * DECODE
            self.there.add(fragment)

    def round(self, rounds: int = 40) -> tuple[float, float]:
        """(ticks of a round, of these the training waits), of the last half."""
        training, courier = self.training(), self.courier()
        now = at = "work"
        while len(self.ends) < rounds:
            paused = self.shared and at == now == "work"
            now = now if paused else next(training)
            at = next(courier)
            self.tick += 1
        half = rounds // 2
        counted = rounds - half
        return (self.ends[-1] - self.ends[half - 1]) / counted, (self.waits[-1] - self.waits[half - 1]) / counted


CASES = [
    *((every, 1, delay) for every in (1, 5) for delay in range(every)),
    *((12, 3, delay) for delay in (0, 1, 4, 7, 11)),
    *((7, 3, delay) for delay in (0, 2, 6)),
    *((2, 4, delay) for delay in (0, 1)),  # several fragments after one step
]


@pytest.mark.parametrize("link", [1, 90, 350, 1500])
@pytest.mark.parametrize(("every", "fragments", "delay"), CASES)
def test_rounds_take_what_a_simulation_takes(every, fragments, delay, link):
    prediction = found(local(every, fragments, delay), link)
    took, waited = Ticks(every, fragments, delay, link, shared=False).round()
    assert prediction.round_ms == pytest.approx(took, abs=2.0 * fragments)  # a tick more where somebody waits
    assert prediction.waiting_ms * every == pytest.approx(waited, abs=2.0 * fragments)
    assert prediction.step_ms * every == pytest.approx(prediction.round_ms)


@pytest.mark.parametrize("link", [1, 90, 140, 350, 1500])
@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (5, 1, 0), (5, 1, 2), (9, 3, 2)])
def test_a_courier_on_the_training_s_cores_slows_it_down(every, fragments, delay, link):
    took, _ = Ticks(every, fragments, delay, link, shared=True).round()
    assert found(local(every, fragments, delay), link, beside=0.0).round_ms == pytest.approx(took, rel=0.01)


def test_without_a_delay_the_training_waits_for_all_of_it():
    assert found(local(10), 80).round_ms == pytest.approx(10 * INNER + BEGIN + ENCODE + 80 + DECODE + END, rel=1e-4)
    assert found(local(10), 80).waiting == pytest.approx(110 / 1122, rel=1e-3)


def test_a_delay_hides_as_many_inner_steps():
    for link, waits in ((100, 0.0), (269, 0.0), (271, 1.0), (500, 230.0)):
        prediction = found(local(10, delay=3), link)
        assert prediction.waiting_ms * 10 == pytest.approx(waits, abs=0.01)
        assert prediction.round_ms == pytest.approx(10 * INNER + BEGIN + END + waits, abs=0.01)


def test_a_link_that_is_never_idle_says_how_long_a_round_takes():
    """Four fragments of 280 ms in ten steps of 100: late only after many rounds, by what the delay hides at first."""
    assert found(local(10, fragments=4, delay=9), 250).round_ms == pytest.approx(4 * 280, rel=1e-4)


def test_bytes_and_the_link_are_of_an_inner_step_on_average():
    steps = local(10, fragments=2)
    prediction, sent = found(steps, 40), cost(steps).bytes_a_step(Work((2 * MILLION,), 1.0, 1.0, 1.0))
    assert sent == pytest.approx((2 * MILLION + 2 * 12) / 10)
    assert prediction.bytes_on_link == pytest.approx(sent)
    assert prediction.wire_ms == pytest.approx(2 * 40 / 10, rel=1e-3)
    assert prediction.exchange_ms == pytest.approx(2 * 70 / 10, rel=1e-3)


def test_the_status_of_a_round_costs_its_hops_beside_a_decode_but_behind_a_sum():
    """5 workers: 4 hops of 2 ms there, 8 back and forth; a decode takes 10 ms."""
    work, network = Work((MILLION,), 0.0, 0.0, 0.0), Network(5, math.inf, 2.0)
    rounds = {kind: predict(work, network, cost(local(1), kind)).round_ms for kind in ("gather", "sum")}
    assert rounds["gather"] == pytest.approx(BEGIN + ENCODE + 4 * 2 + max(DECODE, 16) + END)
    assert rounds["sum"] == pytest.approx(BEGIN + ENCODE + 8 * 2 + DECODE + 16 + END)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.1, 1e4))
def test_more_inner_steps_a_round_are_never_slower(one, other, link):
    few, many = (found(local(every), link) for every in sorted((one, other)))
    assert many.step_ms <= few.step_ms * (1 + 1e-9)
    assert many.waiting_ms <= few.waiting_ms * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(0, 29), st.integers(0, 29), st.floats(0.1, 1e4))
def test_a_longer_delay_is_never_slower(every, one, other, link):
    short, long = (found(local(every, delay=min(delay, every - 1)), link) for delay in sorted((one, other)))
    assert long.step_ms <= short.step_ms * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 29), st.floats(0.1, 1e4))
def test_a_step_is_never_shorter_than_its_parts(every, fragments, delay, link):
    prediction = found(local(every, fragments, min(delay, every - 1)), link)
    assert prediction.step_ms >= INNER + (BEGIN + END) * fragments / every - 1e-6
    assert prediction.step_ms >= prediction.wire_ms - 1e-6
    assert 0 <= prediction.waiting < 1


# ---- costs


def specs(device: str) -> list[str]:
    """Every method with every=, where local steps take it."""
    given = [known.example or name for name, known in METHODS.items() if name != "vgc"]
    given += ["vgc:alpha=0,density=0.03", "vgc:alpha=0,max_bytes_per_step=5000", "vgc:alpha=0,floor=0.1"]
    return [f"{spec}{',' if ':' in spec else ':'}every=5,delay=2" for spec in given] + ["diloco", "streaming_diloco"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_method_can_be_planned_with_local_steps(device):
    work, network = work_of(2_600_000, 5.0, 10.0, 0.0), Network(4, 20.0, 0.1)
    for spec in specs(device):
        planned = cost_of(spec, device)
        assert planned.local is not None
        assert planned.local.begin_ns > 0
        assert planned.moments == 1.0
        prediction = predict(work, network, planned)
        assert work.compute_ms < prediction.step_ms < 4000
        assert prediction.round_ms == pytest.approx(planned.local.every * prediction.step_ms)


def test_one_more_decode_where_error_feedback_stands_around_a_method():
    assert isinstance(method_of(recipe_of("qsgd:every=5"), 1), ErrorFeedback)
    plain, fed_back = cost_of("qsgd", "cpu"), cost_of("qsgd:every=5", "cpu")
    assert fed_back.encode_ns == pytest.approx(plain.encode_ns + plain.decode_ns + plain.decode_message_ns)
    assert fed_back.bytes_per_element == plain.bytes_per_element


def test_the_bytes_of_a_round_are_those_of_its_steps():
    assert method_of(recipe_of("vgc:alpha=0,max_bytes_per_step=5000,every=7"), 1).most_bytes == 35_000


def test_what_the_training_does_itself_grows_with_what_the_recipe_asks_for():
    def end(spec: str) -> float:
        return typical_local(recipe_of(spec), "cpu").end_ns

    assert end("dense:every=5") < end("diloco:every=5") < end("diloco:every=5,delay=1,mixing=0.5")
    assert typical_local(recipe_of("dense:every=5"), "cpu").begin_ns < 5 < 1000 * end("diloco")
    for spec in ("dense:every=5", "streaming_diloco:every=9"):
        timed = measured_local(recipe_of(spec), 50_000, torch.device("cpu"))
        assert (timed.every, timed.delay) == (recipe_of(spec).every, recipe_of(spec).delay)
        assert 0 < timed.begin_ns < 10_000
        assert 0 < timed.end_ns < 10_000


# ---- the choice

WORK = Work((10_000_000,) * 4, 100.0, 300.0, 20.0)
DENSE = Cost("dense", "sum", 4.0, 0.0, 0.01, 0.0, 0.0, 0.0, 1.0)
VGC = Cost("vgc", "gather", 0.02, 40.0, 1.0, 0.5, 0.1, 0.4, 1.1, room=True)
DILOCO = replace(DENSE, spec="diloco", local=RoundCost(500))


def test_a_verdict_for_local_steps_says_that_they_change_the_training():
    verdict = choose(WORK, Network(4, 100.0, 0.1), [DENSE, VGC, DILOCO])
    assert verdict.chosen == "diloco"
    assert " instead of " in verdict.words
    assert " with dense. " in verdict.words  # what is not compressed is no cast for that
    assert verdict.words.endswith(CHANGED)
    alone = choose(WORK, Network(4, 100.0, 0.1), [DILOCO])
    assert alone.words.endswith(f"it is the only one given. {CHANGED}")


def test_nobody_gets_local_steps_who_did_not_ask():
    verdict = choose(WORK, Network(4, 0.1, 0.1), [DENSE, VGC])
    assert verdict.chosen == "vgc"
    assert "alone" not in verdict.words
    unasked = choose(WORK, Network(4, math.inf, 0.0), [DENSE, VGC, DILOCO])
    assert unasked.chosen == "dense"
    assert "alone" not in unasked.words


def test_auto_says_what_local_steps_would_take_where_every_step_waits():
    network = Network(4, 10.0, 0.1)
    step_ms = predict(WORK, network, VGC).step_ms
    assert step_ms > 1.5 * WORK.compute_ms
    advice = advise(WORK, network, step_ms, "cpu")
    assert advice is not None
    again = predict(WORK, network, cost_of(f"{advice.method},every={advice.every}", "cpu"))
    assert again == advice.prediction
    assert again.waiting < 0.1
    fewer = predict(WORK, network, cost_of(f"{advice.method},every={advice.every // 2}", "cpu"))
    assert fewer.waiting > 0.1
    chooser = SimpleNamespace(_work=WORK, network=network, _reducer=SimpleNamespace(device=torch.device("cpu")))
    verdict = Verdict("vgc", {"vgc": Prediction(step_ms, 0.0, 0.0, 0.0)}, "vgc: on this link it is slow")
    advised = MethodChooser._with_advice(chooser, verdict, 2 * step_ms)
    assert (advised.chosen, advised.local) == ("vgc", advice)
    call = f'gradwire.local(..., "vgc:alpha=0,density=0.03125", every={advice.every})'
    assert advised.words.startswith(f"vgc: on this link it is slow. Local steps, {call}, would take about ")
    assert MethodChooser._with_advice(chooser, verdict, 1.4 * WORK.compute_ms) is verdict


def test_no_advice_where_the_link_is_no_bottleneck_or_nothing_helps():
    assert advise(WORK, Network(4, 1e4, 0.1), 1.4 * WORK.compute_ms, "cpu") is None
    assert advise(WORK, Network(4, 1e-3, 0.1), 1e9, "cpu") is None

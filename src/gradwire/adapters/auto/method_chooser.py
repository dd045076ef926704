"""Chooses the method of one link: by the cost model at first, by what was measured as soon as it was.

    1. Dense: some steps are timed. Where the link hardly holds them up nothing can be won, and that is all.
    2. Otherwise encode and decode of the methods are timed on the gradients there are, and the cost model says which
       step is the shortest. A method that loses information must win by a margin.
    3. The chosen method is timed in turn. If the prediction was wrong it is corrected, and the choice is made anew.
       While a compressor is in use, methods that may be faster than they are predicted to be are timed too, once.
    4. When steps become longer or shorter than they were, or now and then, the link is measured again: the same choice.

All of it happens between two steps, right after the optimizer's, from numbers of all ranks: so all ranks choose the
same. Nothing is swapped or held back while a sum is the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.adapters.auto.step_clock import Clock
from gradwire.adapters.auto.trial_costs import NUMBERS, dry_run, likely_error, rival
from gradwire.adapters.reducer import Reducer
from gradwire.errors import CheckpointError
from gradwire.exchange.courier import Flight, agree, courier_of, device_of
from gradwire.methods import Compressor, Dense, to_spec
from gradwire.plan.choose import Verdict, choose, describe
from gradwire.plan.local_advice import advise
from gradwire.plan.model import Cost, Network, Work, predict
from gradwire.plan.probe import probe

WARM = {False: 3, True: 10}  # steps after a switch that do not count; if much is sent at first, and less later
WINDOW = 5  # steps between two looks at the clock
MOST, ENOUGH_MS = 30, 1000.0  # steps that a method is timed for; fewer, if they take so long together
SLOW_MS = 200.0  # steps longer than this are looked at one by one
DRIFT = 1.3  # by how much a step may change before the link is measured again
SHARES = {False: 0.005, True: 0.02}  # of the time, for measuring the link although nothing has changed; if compressed
PROBE_S = 0.5  # a measurement of the link, but for its small collectives
MARGIN = 0.05  # by how much a method that loses information must be faster


class MethodChooser:
    """Call `stepped` after every optimizer step, on every rank."""

    def __init__(self, reducer: Reducer, methods: Sequence[Compressor]) -> None:
        """Collective. methods: what may be chosen; Dense, with which it begins, always may."""
        self._reducer = reducer
        self.methods: dict[str, Compressor] = {to_spec(method): method for method in (Dense(), *methods)}
        agree(reducer.group, {"methods of auto": ", ".join(self.methods)}, reducer.device)
        self.verdict: Verdict | None = None
        self._courier, self._device = courier_of(reducer.group), device_of(reducer.group, reducer.device)
        self._clock = reducer.clock = Clock(keep=MOST)
        self._work: Work | None = None
        self._costs: dict[str, Cost] = {}
        self._errors: dict[str, float] = {}  # by method: measured / predicted; the newest is the last
        self._seen = reducer.steps  # exchanges that were noticed
        self._asked: Flight | None = None
        self._since = 0  # steps with this method
        self._bytes = 0  # sent when the steps began to count
        self._expected_ms: float | None = None
        self.network = self._probed()
        self._begin()
        reducer.between_steps = self._stepped

    @property
    def chosen(self) -> str:
        """As a spec."""
        return to_spec(self._reducer.compressor)

    def method_of(self, state: object) -> Compressor | None:
        """The one that a checkpoint was saved with; None where it does not say."""
        name = state.get("compressor") if isinstance(state, Mapping) else None
        if not isinstance(name, str):
            return None
        alike = [method for method in self.methods.values() if name.startswith(f"{type(method).__name__}(")]
        if not alike:
            raise CheckpointError(f"the state is of {name}, and auto may not choose that: add it to methods=")
        return next((method for method in alike if repr(method) == name), alike[0])  # options may be other ones

    def take_over(self, method: Compressor) -> None:
        """Goes on with it, because something of it is held back. Collective."""
        self._reducer.use(method)
        self._begin()

    def stop(self) -> None:
        """Somebody else chooses from now on."""
        self._reducer.clock = self._reducer.between_steps = None

    # ---- between two steps

    def _stepped(self) -> None:
        if self._reducer.steps == self._seen:
            return  # another optimizer of the same step
        self._seen = self._reducer.steps
        self._clock.stepped()
        self._since += 1
        if self._since == self._warm:
            self._clock.drop()
            self._bytes = self._reducer.meter.bytes_sent
        if self._asked is not None:
            flight, self._asked = self._asked, None
            self._hear(rows_of(flight))
        elif self._due():
            # read after the next step, so that nobody waits for it
            clock, since_probe = self._clock, time.perf_counter() - self._probed_at
            self._asked = self._ask([clock.step_ms(), *clock.recent_ms(), *clock.parts(), since_probe])

    def _ask(self, numbers: Sequence[float]) -> Flight:
        """Gathers as many numbers of every rank. Bytes as int32, because every backend carries those."""
        return self._courier.gather(torch.tensor(numbers, dtype=torch.float64).view(torch.int32).to(self._device))

    def _begin(self) -> None:
        """With a method that is in use from now on."""
        self._clock.forget()
        self._asked, self._since, self._bytes, self._expected_ms = None, 0, 0, None
        self._warm = WARM[self._reducer.compressor.needs_room]

    def _due(self) -> bool:
        """The same on every rank: from numbers that all have."""
        if self._since < self._warm + WINDOW:
            return False
        slow = self._expected_ms is not None and self._expected_ms > SLOW_MS
        return slow or (self._since - self._warm) % WINDOW == 0

    def _hear(self, rows: list[list[float]]) -> None:
        """Figures of all ranks."""
        step_ms, shorter, longer = (max(column) for column in list(zip(*rows, strict=True))[:3])
        timed = self._since - self._warm
        if self._expected_ms is None and timed < MOST and timed * step_ms < ENOUGH_MS:
            return
        self._learn(max((row[3:6] for row in rows), key=sum))  # of the rank that the others wait for
        first = self._expected_ms is None
        expected = self._predicted_ms() if self._expected_ms is None else self._expected_ms
        drifted = shorter > DRIFT * expected or longer < expected / DRIFT
        worth = first or WINDOW * abs(step_ms - expected) / 1e3 > self._probe_s
        compressed = self._reducer.compressor.kind != "sum"
        again = (drifted and worth) or SHARES[compressed] * rows[0][6] > self._probe_s
        if again and self._has_changed():
            self._plan(self._predicted_ms())
            self._begin()  # what was timed so far was on another link
        elif first or again:
            self._expected_ms = step_ms
            self._errors.pop(self.chosen, None)
            self._errors[self.chosen] = step_ms / self._predicted_ms()
            self._plan(step_ms)

    def _learn(self, parts: list[float]) -> None:
        """What the clock says of the method in use: of the step itself while it is plain, else of what it adds."""
        spec = self.chosen
        if self._work is None or self._reducer.compressor.kind == "sum":
            forward, backward, after = parts
            self._work = Work(tuple(layout.numel for layout in self._clock.layouts()), forward, backward, after)
        self._price([spec])
        # the same on every rank: so long are the messages of all
        n_bytes = (self._reducer.meter.bytes_sent - self._bytes) / max(1, self._since - self._warm)
        known: dict[str, Any] = {"bytes_per_element": n_bytes / self._reducer.n_parameters, "head_bytes": 0.0}
        if self.methods[spec].needs_moments:
            plain = self._work.forward_ms + self._work.backward_ms
            known["moments"] = max(1.0, sum(parts[:2]) / plain) if plain else 1.0
        self._costs[spec] = replace(self._costs[spec], **known)

    def _predicted_ms(self) -> float:
        """A step of the method in use."""
        assert self._work is not None
        return predict(self._work, self.network, self._costs[self.chosen]).step_ms

    def _has_changed(self) -> bool:
        """Measures the link again. What was wrong with predictions says nothing of another link."""
        before, self.network = self.network, self._probed()
        changed = not 1 / DRIFT < self.network.mbit / before.mbit < DRIFT
        if changed:
            self._errors.clear()
        return changed

    def _probed(self) -> Network:
        start = time.perf_counter()
        network = probe(self._reducer.group, self._reducer.device, at_most_s=PROBE_S)
        self._probed_at = time.perf_counter()
        self._probe_s = max(row[0] for row in rows_of(self._ask([self._probed_at - start])))
        return network

    # ---- the choice

    def _plan(self, step_ms: float) -> None:
        """step_ms: of the method in use, on the link as it is now."""
        assert self._work is not None
        verdict = self._choose([spec for spec, method in self.methods.items() if method.kind == "sum"])
        best_ms = verdict.predictions[verdict.chosen].step_ms
        if best_ms > (1 + MARGIN) * self._work.compute_ms:  # else there is nothing to be won
            verdict = self._choose(list(self.methods))
        least = self._least_gain(verdict.chosen)
        if verdict.predictions[verdict.chosen].step_ms > (1 - least) * step_ms:
            words = f"{self.chosen}: on this link ({describe(self.network)}) nothing else is faster by {least:.0%}"
            verdict = replace(verdict, chosen=self.chosen, words=words)
        verdict = self._with_advice(self._or_rival(verdict), step_ms)
        if (self.verdict is None or verdict.chosen != self.chosen) and dist.get_rank(self._reducer.group) == 0:
            print(f"gradwire: step {self._reducer.steps}: {verdict.words}")
        self.verdict = verdict
        if verdict.chosen != self.chosen:
            self._reducer.use(self.methods[verdict.chosen])
            self._begin()

    def _with_advice(self, verdict: Verdict, step_ms: float) -> Verdict:
        """Where even the shortest step waits for the link: local steps. No hook of DDP can switch to them."""
        assert self._work is not None
        least_ms = min(step_ms, *(prediction.step_ms for prediction in verdict.predictions.values()))
        kind = "cuda" if self._reducer.device.type == "cuda" else "cpu"
        advice = advise(self._work, self.network, least_ms, kind)
        return verdict if advice is None else replace(verdict, words=f"{verdict.words}. {advice.words}", local=advice)

    def _or_rival(self, verdict: Verdict) -> Verdict:
        """While a compressor is in use, and the choice was timed on this link: one that was not, and may be faster."""
        chosen = verdict.chosen
        if self._reducer.compressor.kind == "sum" or chosen not in self._errors:
            return verdict
        below_ms = (1 - MARGIN) * verdict.predictions[chosen].step_ms
        other = rival(verdict.predictions, self._errors, self.methods, below_ms)
        if other is None:
            return verdict
        words = f"{other}: on this link ({describe(self.network)}) it may be faster than {chosen}: it is timed"
        return replace(verdict, chosen=other, words=words)

    def _least_gain(self, spec: str) -> float:
        """What a switch must win, so that methods that are nearly equal do not take turns.

        Back to a sum nothing: `choose` takes it as soon as a method that loses information is not faster by the margin.
        From a sum to one that is only predicted to be faster, twice the margin.
        """
        to_sum, from_sum = (self.methods[one].kind == "sum" for one in (spec, self.chosen))
        if spec == self.chosen or (to_sum and not from_sum):
            return -math.inf
        return 2 * MARGIN if from_sum and not to_sum and spec not in self._errors else MARGIN

    def _choose(self, specs: Sequence[str]) -> Verdict:
        assert self._work is not None
        self._price(specs)
        errors = {spec: likely_error(spec, self._errors, self.methods) for spec in specs}
        return choose(self._work, self.network, [self._costs[spec] for spec in specs], MARGIN, errors)

    def _price(self, specs: Sequence[str]) -> None:
        """What each costs on the slowest rank: measured once, on the gradients there are."""
        for spec in (spec for spec in specs if spec not in self._costs):
            cost = dry_run(self._reducer, self._clock.layouts(), self.methods[spec])
            rows = rows_of(self._ask([getattr(cost, name) for name in NUMBERS]))
            slowest: dict[str, Any] = {name: max(row[at] for row in rows) for at, name in enumerate(NUMBERS)}
            self._costs[spec] = replace(cost, **slowest)


def rows_of(flight: Flight) -> list[list[float]]:
    """What was asked for: a row a rank, the same on every rank."""
    rows: list[list[float]] = flight.wait().cpu().view(torch.float64).tolist()
    return rows

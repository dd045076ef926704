"""Which method: the fastest by the cost model, in one sentence that says what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.plan.duration import duration
from gradwire.plan.local_advice import LocalAdvice
from gradwire.plan.model import Cost, Network, Prediction, Work, predict

MARGIN = 0.05
RATES = (1e-3, 1e9)  # Mbit/s between which a break-even is looked for
HALVINGS = 32
CHANGED = "Every worker trains alone between two exchanges, so this is another training: compare its accuracy too"


@dataclass(frozen=True)
class Verdict:
    """What was chosen, what it was chosen from, and why."""

    chosen: str  # spec
    predictions: dict[str, Prediction]  # by spec
    words: str
    local: LocalAdvice | None = None  # what local steps would take: of "auto", which cannot switch to them


def choose(
    work: Work,
    network: Network,
    costs: Sequence[Cost],
    margin: float = MARGIN,
    errors: Mapping[str, float] | None = None,
) -> Verdict:
    """The fastest. One that loses information only where it beats the best cast (dense, bf16) by the margin.

    Local steps count among those, and nothing but what is in `costs` is ever chosen.

    errors: by method, measured / predicted step time, where it is known; the predictions are corrected by it.
    """
    if not costs:
        raise ValueError("there is no method to choose from")
    predictions = {cost.spec: predict(work, network, cost) for cost in costs}
    for spec, error in (errors or {}).items():
        if spec in predictions:
            predictions[spec] = replace(predictions[spec], step_ms=error * predictions[spec].step_ms)

    def fastest(casts: bool) -> str | None:
        specs = [cost.spec for cost in costs if cost.is_cast == casts]
        return min(specs, key=lambda spec: predictions[spec].step_ms, default=None)

    cast, compressed = fastest(casts=True), fastest(casts=False)
    where = f"on this link ({describe(network)})"
    if cast is None or compressed is None:
        chosen = cast or compressed
        assert chosen is not None
        n_others = len(predictions) - 1
        words = f"{chosen}: {where} it is " + (f"the fastest of {n_others + 1}" if n_others else "the only one given")
        return Verdict(chosen, predictions, words + _warning(chosen, costs))
    chosen, words = _compared(cast, compressed, predictions, margin)
    return Verdict(chosen, predictions, f"{chosen}: {where} {words}" + _warning(chosen, costs))


def _warning(chosen: str, costs: Sequence[Cost]) -> str:
    """Where local steps were chosen."""
    local = any(cost.local is not None for cost in costs if cost.spec == chosen)
    return f". {CHANGED}" if local else ""


def _compared(cast: str, compressed: str, predictions: Mapping[str, Prediction], margin: float) -> tuple[str, str]:
    """The fastest method that loses information, or the best cast; and by how much."""
    plain_ms, compressed_ms = predictions[cast].step_ms, predictions[compressed].step_ms
    change = compressed_ms / plain_ms - 1 if plain_ms else 0.0
    if change < -margin:
        took = f"{duration(compressed_ms)} instead of {duration(plain_ms)} with {cast}"
        return compressed, f"a step takes {percent(-change)} less, {took}"
    if change < 0:
        saved = f"compression would save {percent(-change)} ({compressed})"
        return cast, f"{saved}, which is within the margin of {margin:.0%}"
    return cast, f"compression would cost {percent(change)}" + ("" if change < 1 else f" ({compressed})")


def describe(network: Network) -> str:
    """938 Mbit/s, 4 workers."""
    rate = "no limit" if math.isinf(network.mbit) else f"{network.mbit:,.4g} Mbit/s"
    return f"{rate}, {network.workers} worker{'s' if network.workers != 1 else ''}"


def percent(share: float) -> str:
    """12 %, or 0.4 %."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:,.0f} %"


def pays_below(work: Work, network: Network, cost: Cost, against: Cost, margin: float = 0.0) -> float | None:
    """The rate in Mbit/s below which `cost` is faster than `against` by the margin. None: never; inf: always."""

    def pays(mbit: float) -> bool:
        there = replace(network, mbit=mbit)
        return predict(work, there, cost).step_ms < (1 - margin) * predict(work, there, against).step_ms

    slow, fast = RATES
    if not pays(slow):
        return None
    if pays(fast):
        return math.inf
    for _ in range(HALVINGS):
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow

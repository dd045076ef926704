"""What local steps would take on a link that is too slow for every method of a gradient a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.plan.duration import duration
from gradwire.plan.model import Network, Prediction, Work, predict
from gradwire.plan.typical import cost_of

METHOD = "vgc:alpha=0,density=0.03125"
EVERY = (2, 3, 5, 10, 15, 20, 30, 50, 100, 200, 500)  # what one would try: beyond that nobody has trained well
BOUND = 1.5  # a step this many times as long as its computing waits for the link
WAITING = 0.1  # that is little


@dataclass(frozen=True)
class LocalAdvice:
    """The fewest inner steps a round of which the training waits for less than a tenth."""

    method: str
    every: int
    prediction: Prediction

    @property
    def words(self) -> str:
        """One sentence."""
        call = f'gradwire.local(..., "{self.method}", every={self.every})'
        return f"Local steps, {call}, would take about {duration(self.prediction.step_ms)} a step"


def advise(work: Work, network: Network, step_ms: float, device: str) -> LocalAdvice | None:
    """None: where the best method's step is hardly longer than its computing, or where nothing helps.

    Encode and decode as they typically are, so that nothing has to be measured and all ranks come to the same.
    """
    if step_ms <= BOUND * work.compute_ms:
        return None
    cost = cost_of(f"{METHOD},every=1", device)
    assert cost.local is not None
    for every in EVERY:
        found = predict(work, network, replace(cost, local=replace(cost.local, every=every)))
        if found.waiting < WAITING:
            return LocalAdvice(METHOD, every, found)
    return None

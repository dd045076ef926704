"""What local steps cost beside encode and decode: the delta before an exchange, the step of the base after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.local_steps.error_feedback import with_error_feedback
from gradwire.local_steps.outer_step import decay, merged, outer_step
from gradwire.local_steps.recipe import Recipe
from gradwire.plan.rounds import RoundCost

# ns that a pass takes to read or write an element. cpu: an AMD EPYC, one thread, 2.6 and 10 M elements: each of the
# sums below is met to 15 %. cuda: estimated, four bytes at 80 % of the 4.8 TB/s of an H200.
TOUCH_NS = {"cpu": 0.08, "cuda": 0.001}
# ns of an element of a new tensor: on a CPU its pages are new to the process each time; on a GPU torch keeps them
NEW_NS = {"cpu": 2.05, "cuda": 0.0}
REPEATS = 9


def typical_local(recipe: Recipe, device: str) -> RoundCost:
    """Counted from what the training reads and writes; not measured."""

    def ns(touched: int, new: int) -> float:
        return touched * TOUCH_NS[device] + new * NEW_NS[device]

    delta = ns(6 + (2 if with_error_feedback(recipe.compressor).holds_back else 0), new=2)
    step = ns(13 if recipe.outer_momentum else 5, new=0)
    late = 0.0 if not recipe.delay else ns(8, new=3) if recipe.mixing is None else ns(5, new=2)
    return RoundCost(recipe.every, recipe.fragments, recipe.delay, delta, step + late)


def measured_local(recipe: Recipe, numel: int, device: torch.device) -> RoundCost:
    """The same, timed here on so many elements."""
    weights, base, mean = (torch.zeros(numel, device=device) for _ in range(3))
    residual = torch.zeros_like(base) if with_error_feedback(recipe.compressor).holds_back else base[:0]
    momentum = torch.zeros_like(base) if recipe.outer_momentum else None
    sent_from = weights if recipe.delay else None

    def begin() -> None:
        torch.isfinite((base - weights.clone()).sum()).item()
        decay(recipe, residual)

    def end() -> None:
        outer_step(recipe, base, mean, momentum)
        now = weights if sent_from is None else weights.clone()
        weights.copy_(merged(recipe, base, now, sent_from))

    begin_ns, end_ns = (_usual_ns(once, base) for once in (begin, end))
    return RoundCost(recipe.every, recipe.fragments, recipe.delay, begin_ns, end_ns)


def _usual_ns(once: Callable[[], None], like: Tensor) -> float:
    """An element: the median."""
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        once()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e9 / like.numel()

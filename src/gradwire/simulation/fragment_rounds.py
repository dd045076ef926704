"""The rounds of one fragment, for all workers of a process: what they did is exchanged, and the base weights step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.exchange.in_process import InProcess
from gradwire.local_steps.outer_step import decay, merged, outer_step
from gradwire.local_steps.recipe import Recipe


@dataclass
class LateRound:
    """A round whose sum is on its way."""

    lands_at: int  # inner step
    mean: Tensor | None  # u [n]; None: nobody took part, or the sum is not finite
    sent_from: Tensor | None  # [W, n]: the weights when it was taken; None without a delay


class FragmentRounds:
    """base [n], its momentum [n], weights [W, n]: views, changed in place."""

    def __init__(self, ranks: InProcess, base: Tensor, momentum: Tensor | None, weights: Tensor) -> None:
        self.ranks, self.base, self.momentum, self.weights = ranks, base, momentum, weights
        self.deltas = torch.zeros(weights.shape, device=weights.device)  # in one place: a graph may read them there
        self._moments = self.deltas[:, :0]
        self.flight: LateRound | None = None
        self.taken_at = 0  # the inner step after which the last round was taken

    def take(self, recipe: Recipe, step: int, delay: int, good: Sequence[bool]) -> None:
        """delta = base - weights;  e = decay e + delta;  u = the mean of the messages, which lands `delay` steps later.

        good: whether a worker takes part; the weights of one that does not are the base.
        """
        torch.sub(self.base, self.weights, out=self.deltas)
        for state, takes_part in zip(self.ranks.states, good, strict=True):
            if takes_part and hasattr(state, "residual"):
                decay(recipe, state.residual)
        active = None
        if not all(good):
            active = torch.tensor(good, device=self.deltas.device)[:, None].expand(-1, len(self.ranks.layout))
        done = self.ranks.exchange(self.deltas, self._moments, active)
        mean = done.mean if done.finite and any(good) else None
        self.flight = LateRound(step + delay, mean, self.weights.clone() if delay else None)
        self.taken_at = step

    def land(self, recipe: Recipe) -> None:
        """The base steps, and every worker goes on from it."""
        assert self.flight is not None
        if self.flight.mean is not None:
            outer_step(recipe, self.base, self.flight.mean, self.momentum)
        self.weights.copy_(merged(recipe, self.base, self.weights, self.flight.sent_from))
        self.flight = None

    def restart(self, rank: int) -> None:
        """A worker begins anew at the base: nothing of what it did since a round was taken is left."""
        self.weights[rank] = self.base
        if self.flight is not None and self.flight.sent_from is not None:
            self.flight.sent_from[rank] = self.base

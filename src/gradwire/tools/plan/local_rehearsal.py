"""Local steps in a rehearsal: a recipe's method on what the training does to the weights, fragment by fragment.

A round of H steps would take H times as long as a rehearsal has time for, so its delta is what one step did, times H,
as if all steps of a round were alike. What is sent of it depends on that only where a method has an absolute threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from gradwire.adapters.local_weights import FlatView
from gradwire.local_steps.error_feedback import method_of
from gradwire.local_steps.fragments import fragments_of
from gradwire.local_steps.outer_step import decay
from gradwire.local_steps.recipe import Recipe
from gradwire.plan.costs import Buckets, Dry
from gradwire.plan.local_costs import measured_local
from gradwire.plan.model import Cost


class LocalDry(Dry):
    """A round an inner step."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: Mapping[str, nn.Parameter],
        world_size: int,
        device: torch.device,
        largest: Callable[[list[int]], list[int]],
    ) -> None:
        self.recipe = recipe
        parts = fragments_of({name: p.numel() for name, p in parameters.items()}, recipe.fragments)
        self.weights = [FlatView({name: parameters[name] for name in names}) for names in parts]
        super().__init__(
            method_of(recipe, fragments=1), [view.layout for view in self.weights], world_size, device, largest
        )
        self.before = [view.read() for view in self.weights]
        self.deltas = [torch.zeros_like(base) for base in self.before]

    def look(self) -> None:
        """After every inner step: what it did."""
        now = [view.read() for view in self.weights]
        self.deltas = [(was - is_) * self.recipe.every for was, is_ in zip(self.before, now, strict=True)]
        self.before = now

    def step(self, gradients: Buckets, moments: Buckets, lean: bool = False) -> None:
        """Of the deltas; DDP's gradients and their moments are not looked at."""
        for state in self.states:
            if (residual := getattr(state, "residual", None)) is not None:
                decay(self.recipe, residual)
        # a lap takes the same delta again and again, and sums are written over it
        deltas = self.deltas if self.compressor.kind == "gather" else [delta.clone() for delta in self.deltas]
        super().step(deltas, [delta[:0] for delta in deltas], lean)

    def cost(self, last: int) -> Cost:
        numel = sum(layout.numel for layout in self.layouts)
        return replace(super().cost(last), local=measured_local(self.recipe, numel, self.device))

"""What VGC with a density is compared on: rules, gradients with ties or at the ends of float32, and scalar Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from drawn import draw
from torch import Tensor

from gradwire.codec import Rule
from gradwire.layout import Layout
from oracle import Worker, f32

RULES = {
    "top-k": Rule(0.0, 0.999, None, 0.0, False, "paper", 0.0625),
    "1/8": Rule(0.125, 0.97, None, 0.0, True, "unbiased", 0.25),
    "1/2": Rule(0.5, 0.9, None, 0.0, False, "paper", 0.0625),
    "1": Rule(1.0, 0.999, None, 0.0, True, "paper", 0.125),
    "3/2, more than there are": Rule(1.5, 0.9, None, 0.0, False, "paper", 0.875),
    "floor": Rule(0.125, 0.9, None, 60.0, False, "unbiased", 0.25),
    "everything": Rule(0.0, 0.9, None, 0.0, False, "paper", 1.0),
}
SIZES = [33, 1, 0, 1500, 31, 7]


@dataclass
class ByScore(Worker):
    """The definition of codec/limits.py for one element after another."""

    density: float = 1.0
    limit: int = 1

    def score(self, i: int) -> np.float32:
        return f32(f32(self.r[i] * self.r[i]) - f32(f32(self.alpha) * self.v[i]))

    def counts(self, i: int) -> bool:
        return bool(self.score(i) > 0 and abs(self.r[i]) >= 2.0**-126)

    def passes(self, i: int) -> bool:
        high = not self.floor or self.score(i) > f32(f32(self.floor) * f32(self.floor))
        return bool(self.counts(i) and high and int(self.score(i).view(np.int32)) >= self.limit)

    def _tensor(self, places: range) -> dict[int, np.float32]:
        bins = Counter(int(self.score(i).view(np.int32)) >> 19 for i in places if self.counts(i))
        wanted, above, self.limit = max(1, int(self.density * len(places))), 0, 1
        for b in sorted(bins, reverse=True):
            if above + bins[b] > wanted:
                self.limit = ((b + 1) << 19) - ((wanted - above) << 19) // bins[b]
                break
            above += bins[b]
        return super()._tensor(places)


def plain(layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    return draw(layout, seed, "cpu")


def tied(layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """Few different values, and zeros of both signs."""
    grad, moment = plain(layout, seed)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.0, 1.03, 3.0, -500.0])
    return values[(grad * 1000).long() % 8], (moment * 1000).long() % 3 / 2


def extreme(layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """Tensors of which the squares are zero, denormal or infinite in part, and infinite less infinite."""
    grad, moment = plain(layout, seed)
    scales = torch.tensor([1e-22, 1.0, 1e16, 1e-24, 1e-39, 1e30]).roll(seed)[torch.arange(len(layout)) % 6]
    place = torch.arange(layout.numel)
    moment = torch.where(place % 11 == 0, 3e38, moment * 1e-30)
    return torch.where(place % 50 == 49, 1e30, grad * layout.spread(scales)), moment


def faint(grad: Tensor, moment: Tensor) -> None:
    """Makes the scores zero, but for one element in nine, whose score is a denormal of the lowest bin."""
    grad.fill_(1e-30)
    grad[::9] = -1e-22
    moment.zero_()


def heavy(layout: Layout, step: int) -> tuple[Tensor, Tensor]:
    """Eight samples with Student's t of 3 degrees, around means that stay; sizes that differ from place to place."""
    random = np.random.default_rng(step)
    still = np.random.default_rng(1000)
    scale, mean = np.exp(still.normal(0, 1, layout.numel)), still.standard_t(3, layout.numel) * 0.2
    each = (random.standard_t(3, (8, layout.numel)) + mean) * scale / 8
    return torch.tensor(each.sum(0)).float(), torch.tensor((each**2).sum(0)).float()


INPUTS = {function.__name__: function for function in (plain, tied, extreme)}

"""The method in slow scalar Python, written from its specification and from nothing else.

Every number is a float32 scalar; powers of two are found by frexp, not by bits. One call is one worker's step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

f32 = np.float32
SQRT2 = f32(math.sqrt(2))


def power_below(x: float) -> int:
    """floor(log2 x) of a positive number."""
    return math.frexp(float(x))[1] - 1


def power_near(x: float, rounding: str) -> int:
    """log2 of the power of two that x is rounded to; the boundary itself goes up."""
    exponent = power_below(x)
    boundary = f32(1.5) if rounding == "paper" else SQRT2
    return exponent + (f32(x) / f32(2.0**exponent) >= boundary)


@dataclass
class Worker:
    """One worker's r and v, and Algorithm 1 (tau is None) or 2 over the tensors whose sizes are given."""

    sizes: list[int]
    alpha: float = 1.5
    zeta: float = 0.999
    tau: float | None = None
    floor: float = 0.0
    feedback: bool = False
    rounding: str = "paper"
    momentum: float = 0.0
    r: list[np.float32] = field(default_factory=list)
    v: list[np.float32] = field(default_factory=list)
    u: list[np.float32] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.r = [f32(0)] * sum(self.sizes)
        self.v = [f32(0)] * sum(self.sizes)
        self.u = [f32(0)] * sum(self.sizes)

    def step(self, g, m) -> dict[int, np.float32]:
        """What is sent: {place: value}."""
        sent: dict[int, np.float32] = {}
        begin = 0
        for size in self.sizes:
            places = range(begin, begin + size)
            for i in places:
                self.u[i] = f32(f32(f32(self.momentum) * self.u[i]) + f32(g[i]))
                self.r[i] = f32(self.r[i] + self.u[i])
                self.v[i] = f32(self.v[i] + f32(m[i]))
            for i, value in self._tensor(places).items():
                sent[i], self.u[i] = value, f32(0)
            begin += size
        return sent

    def passes(self, i: int) -> bool:
        r, v = self.r[i], self.v[i]
        threshold = f32(f32(self.alpha / (1 - self.momentum) ** 2) * v)
        if self.floor:
            threshold = f32(threshold + f32(f32(self.floor) * f32(self.floor)))
        return bool(abs(r) >= 2.0**-126 and f32(r * r) > threshold and (self.tau is None or abs(r) > f32(self.tau)))

    def _tensor(self, places: range) -> dict[int, np.float32]:
        passing = [i for i in places if self.passes(i)]
        if self.tau is None and passing:
            largest = max(abs(self.r[i]) for i in passing)
            top = power_below(largest) if self.rounding == "paper" else power_near(largest, "unbiased")
        sent = {}
        for i in places:
            if i in passing and self.tau is not None:
                sent[i] = self._send_tau(i)
            elif i in passing and (d := top - min(power_near(abs(self.r[i]), self.rounding), top)) <= 7:
                sent[i] = f32(math.copysign(2.0 ** (top - d), self.r[i]))
                rest = f32(self.r[i] - sent[i]) if self.feedback else f32(0)
                self.r[i], self.v[i] = rest, f32(rest * rest)
            else:
                self.v[i] = f32(self.v[i] * f32(self.zeta))
        return sent

    def _send_tau(self, i: int) -> np.float32:
        tau, r = f32(self.tau), self.r[i]
        left = f32(f32(self.v[i] - f32(f32(abs(r) * f32(2)) * tau)) + f32(tau * tau))
        self.v[i] = max(left, f32(0))
        value = f32(math.copysign(tau, r))
        self.r[i] = f32(r - value)
        return value

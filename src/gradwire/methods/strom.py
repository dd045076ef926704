"""Strom's threshold: steps 2 to 4 and 6 (N. Strom, Interspeech 2015; described and compared in arXiv:1802.06058).

It is VGC's hybrid without the variance: the same kernels, the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Gather, Message
from gradwire.methods.residual import Residual, WithResidual
from gradwire.methods.vgc import VGC, WIRES, VGCState

LEAST, MOST = 2.0**-62, 2.0**62  # the kernels square r and tau, in float32


class StromState(Residual):
    """The residual, and zeros in the place of VGC's variance and moment: no fields, so nobody saves them.

    Two tensors, because the CPU's loop is vectorized only where what it writes is not what it reads: 3 ms, not 14, for
    2.6 M elements on one core of an EPYC.
    """

    def __init__(self, residual: Tensor) -> None:
        super().__init__(residual)
        self.variance, self.moment = torch.zeros_like(residual), torch.zeros_like(residual)


@dataclass(frozen=True)
class Strom(WithResidual, Gather):
    """Sends an element when it is large enough: |r| > tau; sign(r) tau is sent and taken from r.

    tau: the threshold, in units of the gradient; there is no good value for every model, so there is no default.
    wire: "compact", or "words", 32 bits an element; the same elements either way.
    """

    tau: float
    wire: str = "compact"

    needs_room: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not LEAST <= self.tau <= MOST:
            raise ValueError(f"Strom: tau must be a number in 2^-62 .. 2^62, got {self.tau}")
        if self.wire not in WIRES:
            raise ValueError(f"Strom: wire must be one of {', '.join(WIRES)}, got {self.wire!r}")

    def init(self, layout: Layout, device: torch.device) -> StromState:
        return StromState(torch.zeros(layout.numel, dtype=torch.float32, device=device))

    def encode(self, grad: Tensor, moment: Tensor, state: StromState, context: Context) -> Message:
        """v stays 0: where |r| > tau, VGC's v = max(v - 2 |r| tau + tau^2, 0) is 0 again."""
        return self.as_vgc.encode(grad, state.moment, VGCState(state.residual, state.variance), context)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        return self.as_vgc.decode(messages, out, context)

    def words(self, numel: int, room: int) -> int:
        return self.as_vgc.words(numel, room)

    @property
    def as_vgc(self) -> VGC:
        """The same elements and bytes."""
        return VGC(alpha=0.0, tau=self.tau, wire=self.wire)

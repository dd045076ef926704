"""Strom's threshold: steps 2 to 4 and 6 (N. Strom, Interspeech 2015; described and compared in arXiv:1802.06058).

It is VGC's hybrid without the variance: the same kernels, the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from gradwire.methods.base import Arrival, Context, Gather, Message
from gradwire.methods.residual import Residual, WithResidual
from gradwire.methods.vgc import VGC, WIRES

LEAST, MOST = 2.0**-62, 2.0**62  # the kernels square r and tau, in float32


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

    def encode(self, grad: Tensor, moment: Tensor, state: Residual, context: Context) -> Message:
        return self.as_vgc.encode(grad, moment, state, context)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        return self.as_vgc.decode(messages, out, context)

    def words(self, numel: int, room: int) -> int:
        return self.as_vgc.words(numel, room)

    @cached_property
    def as_vgc(self) -> VGC:
        """The same elements and bytes."""
        return VGC(alpha=0.0, tau=self.tau, wire=self.wire)

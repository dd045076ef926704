"""Variance-based gradient compression: steps 2 to 4 and 6 (Tsuzuku, Imachi, Akiba, arXiv:1802.06058)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compressors.base import Arrival, Context, Message
from gradwire.errors import MessageError
from gradwire.layout import Layout
from gradwire.wire import header, words

FORMAT = 1  # the paper's words
ROUNDINGS = ("paper", "unbiased")


@dataclass
class VGCState:
    """Two numbers an element that never leave the worker."""

    residual: Tensor = field(metadata={"power": 1})  # r: computed and not yet sent
    variance: Tensor = field(metadata={"power": 2})  # v: how uncertain r is


@dataclass(frozen=True)
class VGC:
    """Sends an element when it is unambiguous: r^2 > alpha v + floor^2, as a sign, three bits of exponent and a place.

    alpha: how many times r^2 must exceed its variance; zeta: decay of v where nothing was sent.
    tau: the hybrid with Strom's threshold: also |r| > tau, and sign(r) tau is sent.
    floor: an absolute bound beside the variance (alpha = 0 with a floor is a plain threshold).
    feedback: what rounding cut off stays in r; rounding: "paper" (1.5 goes up) or "unbiased" (sqrt 2 goes up).
    """

    alpha: float = 1.5
    zeta: float = 0.999
    tau: float | None = None
    floor: float = 0.0
    feedback: bool = False
    rounding: str = "paper"

    needs_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("alpha", "zeta", "tau", "floor"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"VGC: {name} must be a finite number, got {value}")
        if self.alpha < 0:
            raise ValueError(f"VGC: alpha must be >= 0, got {self.alpha}")
        if self.floor < 0:
            raise ValueError(f"VGC: floor must be >= 0, got {self.floor}")
        if self.alpha == 0 and self.floor == 0:
            raise ValueError("VGC: alpha = 0 without a floor sends everything: give a floor > 0, or use Dense()")
        if not 0 < self.zeta <= 1:
            raise ValueError(f"VGC: zeta must be in (0, 1], got {self.zeta}")
        if self.tau is not None and self.tau < kernels.SMALLEST:
            raise ValueError(f"VGC: tau must be > 0 and no denormal, got {self.tau}")
        if self.tau is not None and self.floor:
            raise ValueError(f"VGC: tau ({self.tau}) and floor ({self.floor}) exclude each other: give one of them")
        if self.tau is not None and (self.feedback or self.rounding != "paper"):
            raise ValueError(
                "VGC: with tau the size sent is always tau: feedback and rounding mean nothing, leave them out"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"VGC: rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")

    @classmethod
    def paper(cls, alpha: float, tau: float | None = None) -> VGC:
        """The method as we understand the paper, whatever the defaults become."""
        return cls(alpha=alpha, zeta=0.999, tau=tau, floor=0.0, feedback=False, rounding="paper")

    def init(self, layout: Layout, device: torch.device) -> VGCState:
        return VGCState(*(torch.zeros(layout.numel, dtype=torch.float32, device=device) for _ in range(2)))

    def encode(self, grad: Tensor, moment: Tensor, state: VGCState, context: Context) -> Message:
        """Steps 2 to 4 for one bucket: changes the state, returns the bytes."""
        kernel, layout = kernels.select(grad.device), context.layout
        inputs = (grad, moment, state.residual, state.variance, context.active)
        chosen: kernels.Selection = kernel.encode(*inputs, layout, self._rule, context.capacity, context.step)
        shape = self._shape(context)
        counts = torch.bincount(chosen.index // shape.chunk, minlength=shape.chunks)
        body = words.pack(chosen.index, chosen.code, shape.chunk)
        data = header.write(shape, context.step, chosen.finite, counts, chosen.passed, chosen.exponents, body)

        def undo() -> None:
            state.residual[chosen.index] = chosen.residual
            state.variance[chosen.index] = chosen.variance

        sent = torch.bincount(layout.slot_of(chosen.index), minlength=len(layout))
        return Message(data, undo, sent, chosen.passed, chosen.sent_norm)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = mean over the ranks, in rank order, of what each message [W, words] says; nothing changes on error."""
        layout, kernel = context.layout, kernels.select(out.device)
        shape = self._shape(context)
        header.check(messages, shape, context.step)
        parts = [self._open(rank, message, shape) for rank, message in enumerate(messages)]
        out.zero_()
        for index, code, exponents in parts:
            kernel.add(index, code, exponents, layout, self._rule, out)
        out.div_(len(messages))
        finite = bool((messages[:, 5] & 1).all())
        return Arrival(finite, messages[:, shape.passed].amax(0).tolist())

    def waiting(self, state: VGCState, context: Context) -> Tensor:
        """r of the tensors that have a gradient in this step; DDP drops the result of one that nobody used."""
        if context.active is None:
            return state.residual.clone()
        return torch.where(context.layout.spread(context.active), state.residual, 0.0)

    def clear(self, state: VGCState, context: Context) -> None:
        """r = v = 0 where `waiting` was sent."""
        for tensor in (state.residual, state.variance):
            if context.active is None:
                tensor.zero_()
            else:
                tensor.masked_fill_(context.layout.spread(context.active), 0.0)

    def _open(self, rank: int, message: Tensor, shape: header.Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Places, codes and exponents of one message, with every bound checked."""
        counts = message[shape.counts]
        body = message[shape.body][: int(counts.sum())]
        index, code = words.unpack(body, counts, shape.chunk)
        if bool((index >= shape.layout.numel).any()) or bool((index[1:] <= index[:-1]).any()):
            raise MessageError(f"the message of rank {rank} names places that are not in this bucket, or out of order")
        exponents = message[shape.exponents].view(torch.int8)[: len(shape.layout)].int()
        if self.tau is None and bool((exponents[shape.layout.slot_of(index)] - (code & 7) < -126).any()):
            raise MessageError(f"the message of rank {rank} has exponents below those of float32")
        return index, code, exponents

    def _shape(self, context: Context) -> header.Shape:
        return header.Shape(context.layout, sum(context.capacity), kernels.CHUNK, FORMAT)

    @property
    def _rule(self) -> kernels.Rule:
        return kernels.Rule(self.alpha, self.zeta, self.tau, self.floor, self.feedback, self.rounding)

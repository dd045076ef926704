"""Variance-based gradient compression: steps 2 to 4 and 6 (Tsuzuku, Imachi, Akiba, arXiv:1802.06058)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import codec as kernels
from gradwire.codec import header, words
from gradwire.codec.form import block_length, room_words
from gradwire.codec.interface import problems_of
from gradwire.codec.quota import check_density
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Gather, Message
from gradwire.methods.momentum import Velocity, check_momentum, halted, quicken
from gradwire.methods.rate import bytes_a_second
from gradwire.methods.residual import Residual, WithResidual

ROUNDINGS = ("paper", "unbiased")
WIRES = ("compact", "words")


@dataclass
class VGCState(Residual):
    """Two numbers an element that never leave the worker; with alpha = 0 the residual alone."""

    variance: Tensor = field(metadata={"power": 2})  # v: how uncertain r is


@dataclass
class VGCMomentum(VGCState):
    """And the momentum that goes into r."""

    velocity: Tensor = field(metadata={"power": 1})  # u


@dataclass(frozen=True)
class VGC(WithResidual, Gather):
    """Sends an element when it is unambiguous: r^2 > alpha v + floor^2, as a sign, three bits of exponent and a place.

    alpha: how many times r^2 must exceed its variance; zeta: decay of v where nothing was sent.
    tau: the hybrid with Strom's threshold: also |r| > tau, and sign(r) tau is sent.
    floor: an absolute bound beside the variance (alpha = 0 with a floor is a plain threshold).
    feedback: what rounding cut off stays in r; rounding: "paper" (1.5 goes up) or "unbiased" (sqrt 2 goes up).
    wire: "compact", or "words", the paper's 32 bits an element; the same elements either way.
    density (ours): of every tensor of n elements about max(1, floor(density n)) are to pass, those whose score
    s = r^2 - alpha v > floor^2 is largest: where s is at least a limit, which a histogram of this step's scores gives
    (codec/limits.py), in place of r^2 > alpha v + floor^2. Fewer if so few scores are positive; alpha = 0 is top-k
    in four bits, and no second moments are made for it.
    max_bytes_per_step (ours): the density that fits: what a worker hands to the collectives in a step, heads included,
    is at most that, and nearly that if enough scores are positive. Nothing but a change of the method is sent densely.
    momentum (ours), m: u = m u + g goes into r in the place of g, and u = r = v = 0 where an element is sent. A
    contribution comes to 1 / (1 - m) of itself in time, so the test is r^2 > alpha v / (1 - m)^2 + floor^2. The
    optimizer's own momentum must then be 0.
    budget (ours): the same for a rate, "50Mbit/s" or "6.25MB/s", of what a worker's link carries upwards: W - 1
    messages a step. The time of a step is measured as training goes, so two runs do not have the same bits.
    """

    alpha: float = 1.5
    zeta: float = 0.999
    tau: float | None = None
    floor: float = 0.0
    feedback: bool = False
    rounding: str = "paper"
    wire: str = "compact"
    density: float | None = None
    budget: str | None = None
    max_bytes_per_step: int | None = None
    momentum: float = 0.0

    needs_room: ClassVar[bool] = True

    @property
    def needs_moments(self) -> bool:
        """Not where the variance counts for nothing."""
        return self.alpha > 0

    @property
    def holds_back(self) -> bool:
        return True

    @property
    def share(self) -> float | None:
        return self.density

    @property
    def most_bytes(self) -> int | None:
        return self.max_bytes_per_step

    @property
    def most_rate(self) -> float | None:
        return None if self.budget is None else bytes_a_second(self.budget)

    @property
    def own_momentum(self) -> float:
        return self.momentum

    def __post_init__(self) -> None:
        for name in ("alpha", "zeta", "tau", "floor", "density"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"VGC: {name} must be a finite number, got {value}")
        if self.alpha < 0:
            raise ValueError(f"VGC: alpha must be >= 0, got {self.alpha}")
        if self.floor < 0:
            raise ValueError(f"VGC: floor must be >= 0, got {self.floor}")
        sparing = (self.tau, self.density, self.budget, self.max_bytes_per_step)
        if self.alpha == 0 and self.floor == 0 and all(option is None for option in sparing):
            raise ValueError(
                "VGC: alpha = 0 without a floor sends everything: give a floor > 0 or a density, or use Dense()"
            )
        self._check_amount()
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
        check_momentum("VGC", self.momentum)
        if self.momentum and (self.feedback or self.tau is not None):
            raise ValueError("VGC: momentum stops where an element is sent whole: leave out feedback and tau")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"VGC: rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")
        if self.wire not in WIRES:
            raise ValueError(f"VGC: wire must be one of {', '.join(WIRES)}, got {self.wire!r}")

    def _check_amount(self) -> None:
        """How much is sent is said once."""
        names = ("tau", "density", "budget", "max_bytes_per_step")
        given = [f"{name} ({getattr(self, name)})" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"VGC: {' and '.join(given)} exclude each other: give one")
        if self.density is not None:
            check_density("VGC", self.density)
        most = self.max_bytes_per_step
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most <= 0):
            raise ValueError(f"VGC: max_bytes_per_step must be a whole number > 0, got {most!r}")
        if self.budget is not None:
            try:
                bytes_a_second(self.budget)
            except ValueError as error:
                raise ValueError(f"VGC: budget: {error}") from None

    @classmethod
    def paper(cls, alpha: float, tau: float | None = None) -> VGC:
        """The method as we understand the paper, whatever the defaults become."""
        return cls(alpha=alpha, zeta=0.999, tau=tau, floor=0.0, feedback=False, rounding="paper", wire="words")

    def init(self, layout: Layout, device: torch.device) -> Residual:
        kinds = (Residual, Velocity) if self.alpha == 0 else (VGCState, VGCMomentum)
        kind = kinds[bool(self.momentum)]
        return kind(*(torch.zeros(layout.numel, dtype=torch.float32, device=device) for _ in fields(kind)))

    def encode(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> Message:
        """Steps 2 to 4 for one bucket: changes the state, returns the bytes."""
        if self.momentum:
            grad = quicken(state.velocity, grad, self.momentum, context)
        inputs, rule = self._inputs(grad, moment, state, context), self.rule_in(context)
        message, sent = kernels.select(grad.device).encode(inputs, self.shape(context), rule, context.step)
        undo = self._undo(sent, state, kernels.CHUNK)
        return Message(message, undo, sent.codes.sum(1), sent.passed, self.norm(sent.codes, sent.exponents))

    def _inputs(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> kernels.Inputs:
        """Without v and m where they count for nothing."""
        v, m = (state.variance, moment) if self.alpha else (None, None)
        return kernels.Inputs(grad, m, state.residual, v, context.active)

    def choose(
        self,
        grad: Tensor,
        moment: Tensor,
        state: Any,
        context: Context,
        layout: Layout,
        capacity: Sequence[int],
        chunk: int,
    ) -> kernels.Selection:
        """`encode` without a message. The layout may be of several workers, a chunk each."""
        if self.momentum:
            grad = quicken(state.velocity, grad, self.momentum, context)
        inputs, rule = self._inputs(grad, moment, state, context), self.rule_in(context)
        chosen = kernels.select(grad.device).select(inputs, layout, rule, capacity, context.step, chunk)
        return replace(chosen, undo=self._undo(chosen, state, chunk))

    def _undo(self, sent: kernels.Selection, state: Any, chunk: int) -> Callable[[], None]:
        """What takes it back; with momentum u = 0 where something is sent, and that too."""
        if not self.momentum:
            return sent.undo
        return halted(sent.undo, *words.places(sent.words, sent.counts, chunk), state.velocity)

    def norm(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """|sent|_1 = sum_k sum_d n_kd 2^(e_k - d), or n tau: the counts tell, no element is looked at again."""
        if self.tau is not None:
            return codes.sum().double() * self.tau
        return (codes.double() @ _sizes(codes.device)) @ exponents.double().exp2()

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = mean over the ranks, in rank order, of what each message [W, words] says; nothing changes on error."""
        codec, shape = kernels.select(out.device), self.shape(context)
        problems = codec.decode(messages, shape, self.rule, context.step, out)

        def refuse() -> None:
            header.refuse(problems, problems_of(shape), messages, shape, context.step)

        bad = problems.any()
        if out.device.type == "cpu" and bad:
            refuse()
        finite = (messages[:, 5] & 1).all()
        return Arrival(finite, messages[:, shape.passed].amax(0), bad, refuse)

    def words(self, numel: int, room: int) -> int:
        """In the body, for one tensor; the compact format at its worst."""
        if self.wire == "words" or room == 0:
            return room
        most, n_blocks = room_words(numel, room, self.tau is not None), -(-numel // block_length(numel, room))
        return -(-n_blocks * most.bit_length() // 32) + most

    def clear(self, state: Any, context: Context) -> None:
        """r = v = 0 where `waiting` was sent. u goes on: as in a dense training, nothing of it is late."""
        for tensor in (state.residual, state.variance) if self.alpha else (state.residual,):
            context.clear(tensor)

    def shape(self, context: Context) -> header.Shape:
        """Where the parts of a message lie."""
        compact, hybrid = self.wire == "compact", self.tau is not None
        return header.Shape.of(context.layout, context.capacity, kernels.CHUNK, hybrid, compact)

    @property
    def rule(self) -> kernels.Rule:
        """As the kernels want it."""
        test = (self.alpha / (1 - self.momentum) ** 2, self.zeta, self.tau, self.floor)
        return kernels.Rule(*test, self.feedback, self.rounding, self.density)

    def rule_in(self, context: Context) -> kernels.Rule:
        """With the density of this step, if there is one."""
        return self.rule if context.density is None else replace(self.rule, density=context.density)


@lru_cache(maxsize=16)
def _sizes(device: torch.device) -> Tensor:
    """2^-d, d = 0 .. 7, kept on the device."""
    return torch.tensor([2.0**-d for d in range(8)], dtype=torch.float64, device=device)

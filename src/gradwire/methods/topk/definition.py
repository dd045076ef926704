"""The largest elements of each tensor; with momentum Deep Gradient Compression (Lin et al., arXiv:1712.01887)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.codec import numba_ready, triton_ready
from gradwire.codec.quota import Quota, check_density
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.fixed import Body, Fixed
from gradwire.methods.momentum import Velocity, check_momentum, quicken
from gradwire.methods.residual import Residual, WithResidual
from gradwire.methods.topk import largest, places
from gradwire.methods.topk.places import PlaceCode, code_of

DENSITY = 0.01
WARM = 0.25  # the density at the beginning of the warm-up


@dataclass(frozen=True)
class TopK(WithResidual, Fixed):
    """Sends the k = max(1, floor(density n)) largest |r| of every tensor as float32 with their places: r += g.

    With a momentum m: u = m u + g, r += u, and u = r = 0 where an element is sent.

    density: the share of the elements that is sent, 0.01 if nothing is said; or ratio: 1 / density.
    momentum: of the local velocity, in [0, 1); 0: none. The optimizer's own must then be 0.
    clip: the norm of each tensor's gradient on each worker is at most clip / sqrt(W). The paper takes the norm over
        all tensors, which no bucket knows.
    warmup: steps in which the density falls from 0.25 to its own, by the same factor in each.
    exact: always k elements. Else a threshold from a sample may let fewer pass, now and then: these are the largest
        all the same (see largest.py).
    """

    density: float | None = None
    ratio: float | None = None
    momentum: float = 0.0
    clip: float | None = None
    warmup: int = 0
    exact: bool = False

    def __post_init__(self) -> None:
        if self.density is not None and self.ratio is not None:
            raise ValueError(
                f"TopK: density ({self.density}) and ratio ({self.ratio}) say the same thing: give one of them"
            )
        if self.ratio is not None:
            if not 1 <= self.ratio < math.inf:
                raise ValueError(f"TopK: ratio must be a finite number >= 1, got {self.ratio}")
            object.__setattr__(self, "density", 1 / self.ratio)
            object.__setattr__(self, "ratio", None)
        if self.density is None:
            object.__setattr__(self, "density", DENSITY)
        check_density("TopK", self.share)
        check_momentum("TopK", self.momentum)
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"TopK: clip must be a finite number > 0, got {self.clip}")
        if self.warmup < 0:
            raise ValueError(f"TopK: warmup must be >= 0 steps, got {self.warmup}")

    def density_of(self, step: int) -> float:
        """0.25 (density / 0.25)^(step / warmup) in the warm-up; six digits, as libraries differ in the last one."""
        if step >= self.warmup or self.share >= WARM:
            return self.share
        return float(f"{WARM * (self.share / WARM) ** (step / self.warmup):.6g}")

    @property
    def share(self) -> float:
        assert self.density is not None
        return self.density

    @property
    def own_momentum(self) -> float:
        return self.momentum

    @property
    def alike(self) -> bool:
        """Whether nothing in a step depends on its number."""
        return self.exact and not self.warmup

    def init(self, layout: Layout, device: torch.device) -> Residual:
        state: Residual = super().init(layout, device)
        return Velocity(state.residual, torch.zeros_like(state.residual)) if self.momentum else state

    def body_words(self, layout: Layout) -> int:
        """After the warm-up."""
        return _body_words(code_of(layout, self.share))

    def words_in(self, context: Context) -> int:
        return _body_words(self._code(context))

    def _code(self, context: Context) -> PlaceCode:
        return code_of(context.layout, self.density_of(context.step))

    def accumulate(self, grad: Tensor, state: Any, context: Context) -> None:
        """u = m u + g; r += u. Tensors without a gradient keep both."""
        if self.clip is not None:
            grad = _clipped(grad, context.layout, self.clip / context.world_size**0.5)
        state.residual += quicken(state.velocity, grad, self.momentum, context) if self.momentum else grad

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        code = self._code(context)
        self.accumulate(grad, state, context)
        index, values = select_largest(state.residual, code.quota, context.step, self.exact, context.active)
        held = [(state.residual, values)]
        if self.momentum:
            held.append((state.velocity, torch.where(values != 0, state.velocity[index], 0.0)))
        for tensor, sent in held:
            tensor.index_add_(0, index, sent, alpha=-1)  # leaves 0; a place that only fills up the message stays

        def undo() -> None:
            for tensor, sent in held:
                tensor.index_add_(0, index, sent)

        words = torch.cat([values.view(torch.int32), places.pack(index, code)])
        return Body(words, values.abs().sum(), undo, code.sent(values))

    def read(self, bodies: Tensor, context: Context) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Places and values of each rank."""
        code = self._code(context)
        entries, broken, said = code.entries(bodies.device), [], []
        for body in bodies:
            values = body[: code.n_entries].view(torch.float32)
            index, wrong = places.unpack(body[code.n_entries :], code, entries)
            twice = (index.diff() <= 0) & (values[1:] != 0)
            broken.append(wrong | twice.any() | ~torch.isfinite(values).all())
            said.append((index, values))
        return said, torch.stack(broken)

    def add_all(self, said: list[tuple[Tensor, Tensor]], out: Tensor, context: Context) -> None:
        for index, values in said:
            out.index_add_(0, index, values * (1 / len(said)))


def select_largest(flat: Tensor, quota: Quota, step: int, exact: bool, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `largest.largest`, by machine code where there is a compiler for the device."""
    if numba_ready(flat.device):
        from gradwire.methods.topk import cpu

        return cpu.largest(flat, quota, step, exact, active)
    if triton_ready(flat.device) and all(slot.numel < 1 << 31 for slot in quota.layout):  # the kernels count in int32
        from gradwire.methods.topk import gpu

        return gpu.largest(flat, quota, step, exact, active)
    return largest.largest(flat, quota, step, exact, active)


def _body_words(code: PlaceCode) -> int:
    """A float32 and a place for each entry."""
    return code.n_entries + code.words


def _clipped(grad: Tensor, layout: Layout, most: float) -> Tensor:
    """Every tensor with a norm of at most `most`, [N]."""
    parts = [slot.of(grad) for slot in layout]
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    scales = (most / norms).clamp_(max=1).float()
    return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])

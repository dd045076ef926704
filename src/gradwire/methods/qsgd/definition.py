"""Stochastic rounding to a few levels, a norm a group: QSGD (Alistarh et al., arXiv:1610.02132)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.arithmetic.finite import LARGEST, unsound
from gradwire.arithmetic.groups import ScaleGroups, groups_of
from gradwire.codec import fields, numba_ready, triton_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context, Nothing
from gradwire.methods.fixed import Body, Fixed, split

NORMS = ("l2", "max")


@dataclass(frozen=True)
class QSGD(Fixed):
    """Sends norm * sign(g) * l / s, with the level l = s |g| / norm rounded up or down by chance: its mean is g.

    bits: of an element, the sign included: s = 2^(bits - 1) - 1 levels above zero; 32 // bits elements share a word.
    group: consecutive elements of a tensor that share a norm (the last group of a tensor is shorter).
    norm: "l2", the paper's, or "max", the largest |g|: smaller, and so are the steps between the levels.
    seed: of the draws, which are other ones on every rank.

    The body: the norms of all groups as float32, then the elements, in the upper bit of each the sign, below it l.
    """

    bits: int = 4
    group: int = 512
    norm: str = "l2"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"QSGD: bits must be from 2 (a sign and one level) to 8, got {self.bits}")
        if self.group < 1:
            raise ValueError(f"QSGD: group must be >= 1 element, got {self.group}")
        if self.norm not in NORMS:
            raise ValueError(f"QSGD: norm must be one of {', '.join(NORMS)}, got {self.norm!r}")

    @property
    def levels(self) -> int:
        """s: above zero."""
        return (1 << (self.bits - 1)) - 1

    def body_words(self, layout: Layout) -> int:
        return len(groups_of(layout, self.group)) + fields.n_words(layout.numel, self.bits)

    def write(self, grad: Tensor, state: Nothing, context: Context) -> Body:
        groups = groups_of(context.layout, self.group)
        if (fast := _fast(grad.device, groups)) is not None:
            keys = draws.keys(self.seed, context.step, context.layout, context.rank)
            return Body(*fast.write(grad, groups, keys, self.bits, self.norm == "max"))
        return self.plain_write(grad, groups, context)

    def plain_write(self, grad: Tensor, groups: ScaleGroups, context: Context) -> Body:
        """`write` in plain torch, on any device: the definition."""
        norms = self.norms(grad, groups)
        scale = groups.spread(norms)
        size = torch.where(scale > 0, grad.abs() / scale * self.levels, 0.0).clamp_(max=self.levels)
        whole = size.floor()
        chance = draws.uniform(self.seed, context.step, context.layout, grad.device, context.rank)
        level = (whole + (chance < size - whole)).int()
        codes = level | ((grad < 0) & (level > 0)).int() << (self.bits - 1)
        words = torch.cat([norms.view(torch.int32), fields.pack(codes, self.bits)])
        return Body(words, (level * scale).sum() / self.levels)

    def norms(self, grad: Tensor, groups: ScaleGroups) -> Tensor:
        """float32 [G]. Squares are in double precision, where those of the largest and smallest numbers have room."""
        if self.norm == "max":
            return groups.largest(grad)
        return groups.folded(grad.double().square_()).sqrt_().clamp_(max=LARGEST).float()

    def read(self, bodies: Tensor, context: Context) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Norms and codes."""
        norms, words = split(bodies, len(groups_of(context.layout, self.group)))
        return (norms, words), unsound(norms)

    def add_all(self, said: tuple[Tensor, Tensor], out: Tensor, context: Context) -> None:
        """On a CPU all ranks in one pass, tile by tile."""
        groups, (norms, words) = groups_of(context.layout, self.group), said
        if numba_ready(out.device):
            from gradwire.methods.qsgd import cpu

            cpu.add(words, norms * self._share(norms), groups, self.bits, out)
        else:
            self.plain_add(norms, words, out, groups)

    def plain_add(self, norms: Tensor, words: Tensor, out: Tensor, groups: ScaleGroups) -> None:
        """`add_all` in plain torch, on any device: the definition."""
        for norm, row in zip(norms, words, strict=True):
            codes = fields.unpack(row, self.bits, groups.numel)
            value = (codes & self.levels) * groups.spread(norm * self._share(norms))
            out += torch.where(codes > self.levels, -value, value)

    def put(self, said: tuple[Tensor, Tensor], out: Tensor, bad: Tensor, context: Context) -> None:
        """On a GPU all ranks in one pass, and nothing is read of `out`."""
        groups = groups_of(context.layout, self.group)
        if triton_ready(out.device) and (fast := _fast(out.device, groups)) is not None:
            fast.put(*said, self._share(said[0]), groups, self.bits, out, bad)
        else:
            super().put(said, out, bad, context)

    def _share(self, norms: Tensor) -> float:
        """Of a rank's norm in the mean, for one level."""
        return 1 / len(norms) / self.levels


def _fast(device: torch.device, groups: ScaleGroups) -> ModuleType | None:
    """The functions `write` and `add`, or `put`, compiled for the device, where there is a compiler."""
    if triton_ready(device):
        from gradwire.methods.qsgd import gpu

        return gpu if gpu.serves(groups) else None
    if numba_ready(device):
        from gradwire.methods.qsgd import cpu

        return cpu
    return None

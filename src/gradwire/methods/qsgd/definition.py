"""Stochastic rounding to a few levels, a norm a group: QSGD (Alistarh et al., arXiv:1610.02132)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.arithmetic.groups import Groups, folded, groups_of, largest
from gradwire.codec import fields, numba_ready, triton_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context, Nothing
from gradwire.methods.fixed import Body, Fixed, rank_by_rank

NORMS = ("l2", "max")
LARGEST = float(np.finfo(np.float32).max)


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
        layout, groups = context.layout, groups_of(context.layout, self.group)
        if numba_ready(grad.device):
            from gradwire.methods.qsgd import cpu as compiled_qsgd

            keys = draws.keys(self.seed, context.step, layout, context.rank)
            return Body(*compiled_qsgd.write(grad, groups, keys, self.bits, self.norm == "max"))
        if triton_ready(grad.device):
            from gradwire.methods.qsgd import gpu as triton_qsgd

            if triton_qsgd.serves(groups):
                keys = draws.keys(self.seed, context.step, layout, context.rank)
                return Body(*triton_qsgd.write(grad, groups, keys, self.bits, self.norm == "max"))
        return self.plain_write(grad, groups, context)

    def plain_write(self, grad: Tensor, groups: Groups, context: Context) -> Body:
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

    def norms(self, grad: Tensor, groups: Groups) -> Tensor:
        """float32 [G]. Squares are in double precision, where those of the largest and smallest numbers have room."""
        if self.norm == "max":
            return largest(grad, groups)
        return folded(groups.rows(grad.double().square_())).sqrt_().clamp_(max=LARGEST).float()

    def read(self, bodies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        n_groups = len(groups_of(context.layout, self.group))
        return bodies, unsound(bodies[:, :n_groups].view(torch.float32))

    def add(self, body: Tensor, out: Tensor, weight: float, context: Context) -> None:
        groups = groups_of(context.layout, self.group)
        norms = body[: len(groups)].view(torch.float32)
        codes = fields.unpack(body[len(groups) :], self.bits, context.layout.numel)
        value = (codes & self.levels) * groups.spread(norms * (weight / self.levels))
        out += torch.where(codes > self.levels, -value, value)

    def add_all(self, said: Tensor, out: Tensor, context: Context) -> None:
        """All ranks in one pass, tile by tile, where there is a compiler."""
        if not numba_ready(out.device):
            rank_by_rank(self.add, said, out, context)
            return
        from gradwire.methods.qsgd import cpu as compiled_qsgd

        groups = groups_of(context.layout, self.group)
        norms, words = said[:, : len(groups)].view(torch.float32), said[:, len(groups) :]
        compiled_qsgd.add(words, norms * (1 / len(said) / self.levels), groups, self.bits, out)

    def put(self, said: Tensor, out: Tensor, bad: Tensor, context: Context) -> None:
        """On a GPU the same, and nothing is read of `out`."""
        if triton_ready(out.device):
            from gradwire.methods.qsgd import gpu as triton_qsgd

            groups = groups_of(context.layout, self.group)
            if triton_qsgd.serves(groups):
                triton_qsgd.put(said, groups, self.bits, out, bad)
                return
        super().put(said, out, bad, context)


def unsound(norms: Tensor) -> Tensor:
    """bool: norms [..., G] that no rank can have sent."""
    return ~((norms >= 0) & (norms <= LARGEST)).all(-1)

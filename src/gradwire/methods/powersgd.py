"""PowerSGD: every matrix as the product of two thin ones, two sums a bucket (Vogels et al., arXiv:1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.arithmetic import draws
from gradwire.arithmetic.finite import sifted
from gradwire.layout import Layout, Slot
from gradwire.methods.base import SAME, Context, Outcome, Rounds
from gradwire.methods.residual import Residual, WithResidual

# A row whose square shrinks below this share beside the rows above it has no direction that float32 could tell.
DEPENDENT = 1e-12


@dataclass
class Warm(Residual):
    """What is held back, and where the next step begins to look."""

    # Q^T [rank, I] by parameter, every row divided by its largest element: no gradient is too small for the products
    basis: dict[str, Tensor] = field(metadata={"power": SAME})


@dataclass(frozen=True)
class PowerSGD(WithResidual, Rounds):
    """Sums two thin matrices in place of every matrix M = r + g [O, I], found by one power iteration.

    Q' is the last step's, means are over the workers:
        P = orthonormal(mean M Q')    Q = mean M^T P    decoded P Q^T    r = M - P Q^T

    rank: columns of P and Q; a tensor of more than two dimensions is the matrix [first, all others].
    warm_start: go on from the last step's Q'; otherwise, and in the first step, it is drawn, normally distributed.
    min_compression: a tensor goes as it is unless rank (O + I) numbers are that many times fewer; a vector always does.
    seed: of the draws, which are the same on every worker.
    """

    rank: int = 4
    warm_start: bool = True
    min_compression: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"PowerSGD: {name} must be a whole number, got {value!r}")
        if self.rank < 1:
            raise ValueError(f"PowerSGD: rank must be >= 1, got {self.rank}")
        if not 1 <= self.min_compression < math.inf:
            raise ValueError(f"PowerSGD: min_compression must be a finite number >= 1, got {self.min_compression}")

    @property
    def alike(self) -> bool:
        """Whether nothing in a step depends on its number."""
        return self.warm_start

    def init(self, layout: Layout, device: torch.device) -> Any:
        state = super().init(layout, device)
        if not self.warm_start:
            return state
        drawn = {slot.name: self._drawn(slot, 0, device) for slot in layout if self._is_thin(slot)}
        return Warm(state.residual, drawn)

    def rounds(self, grad: Tensor, state: Any, context: Context) -> Generator[Tensor, Tensor, Outcome]:
        """P and all that goes as it is in the first sum, Q in the second; the mean is written over the gradient.

        r is M from the start. If a sum is not finite, Q = 0: nothing is taken from r, and the basis stays.
        """
        layout = context.layout
        good, is_good = sifted(context.only(grad))
        state.residual.add_(good)
        whole, out = ([slot.of(flat) for slot in layout] for flat in (state.residual, grad))
        thin = {k: slot for k, slot in enumerate(layout) if self._is_thin(slot)}
        plain = [k for k in range(len(layout)) if k not in thin]
        matrices = [whole[k].view(slot.shape[0], -1) for k, slot in thin.items()]
        basis = [self._basis(slot, state, context) for slot in thin.values()]

        asked = [*map(_by_columns, basis, matrices), *(whole[k] for k in plain)]
        first = yield torch.where(is_good, _packed(asked, [*thin, *plain], context), torch.nan)
        columns, means = _unpacked(first, asked, len(thin))
        left = [torch.where(torch.isfinite(p), p, 0.0) for p in _orthonormal(columns)]
        found = [p @ m for p, m in zip(left, matrices, strict=True)]
        second = (yield _packed(found, [*thin], context)) if found else first[:0]
        finite = torch.isfinite(first).all() & torch.isfinite(second).all()
        right, _ = _unpacked(torch.where(finite, second, 0.0), found, len(thin))

        undo = _undo(matrices, left, right, [*(whole[k] for k in plain), *basis])
        for k, matrix, p, q in zip(thin, matrices, left, right, strict=True):
            matrix.sub_(torch.mm(p.t(), q, out=out[k].view_as(matrix)))
        for k, mean in zip(plain, means, strict=True):
            out[k].copy_(mean)
            whole[k].mul_(~(finite if context.active is None else finite & context.active[k]))
        for old, q in zip(basis, right, strict=True):
            old.copy_(_turned(q, old))

        norm = torch.stack([part.abs().sum() for part in out]).sum()
        return Outcome(grad, finite, undo, self._counts(layout), norm)

    def _is_thin(self, slot: Slot) -> bool:
        """Whether it goes as two thin matrices."""
        return len(slot.shape) > 1 and slot.numel > self.min_compression * self._numbers(slot)

    def _numbers(self, slot: Slot) -> int:
        """In two thin matrices: rank (O + I)."""
        return self.rank * (slot.shape[0] + slot.numel // max(1, slot.shape[0]))

    def _counts(self, layout: Layout) -> Tensor:
        """Numbers sent of every tensor, [K]."""
        return torch.tensor([self._numbers(slot) if self._is_thin(slot) else slot.numel for slot in layout])

    def _basis(self, slot: Slot, state: Any, context: Context) -> Tensor:
        if self.warm_start:
            kept: Tensor = state.basis[slot.name]
            return kept
        return self._drawn(slot, context.step, state.residual.device)

    def _drawn(self, slot: Slot, step: int, device: torch.device) -> Tensor:
        """Q^T [rank, I], standard normal (Box and Muller), the same on every device: in float64, rounded once."""
        shape = (self.rank, slot.numel // slot.shape[0])
        size, angle = draws.uniform(self.seed, step, Slot(slot.name, 0, (2, *shape)), device).double().view(2, *shape)
        drawn: Tensor = size.neg().log1p().mul(-2).sqrt() * angle.mul(2 * math.pi).cos()
        return drawn.float()


def _by_columns(rows: Tensor, matrix: Tensor) -> Tensor:
    """Q^T M^T [rank, O]. In this order: M Q with four columns takes MKL four times as long."""
    if len(rows) == 1:  # two, or MKL's last bits depend on where in memory the matrix begins
        return (torch.cat([rows, torch.zeros_like(rows)]) @ matrix.t())[:1]
    return rows @ matrix.t()


def _packed(parts: Sequence[Tensor], places: Sequence[int], context: Context) -> Tensor:
    """One flat tensor whose sum over the workers is the mean; zeros for a tensor without a gradient."""
    if context.active is not None:
        parts = [part * context.active[k] for part, k in zip(parts, places, strict=True)]
    return torch.cat([part.reshape(-1) for part in parts]).mul_(1 / context.world_size)


def _unpacked(flat: Tensor, like: Sequence[Tensor], n_first: int) -> tuple[list[Tensor], list[Tensor]]:
    """The parts of a sum in the shapes of what was packed: the first ones, and the others."""
    parts = torch.split(flat, [one.numel() for one in like])
    shaped = [part.view_as(one) for part, one in zip(parts, like, strict=True)]
    return shaped[:n_first], shaped[n_first:]


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal rows, in their order, of every matrix [rank, O]; one that depends on those above it becomes zeros.

    Gram and Schmidt on the inner products, [K, rank, rank] in float64: a few small steps for all matrices together.
    """
    if not matrices:
        return []
    wide = [matrix.double() for matrix in matrices]
    inner = torch.stack([matrix @ matrix.t() for matrix in wide])
    mixing = torch.zeros_like(inner)  # orthonormal rows = mixing @ rows
    for j in range(inner.shape[1]):
        row = -(mixing @ inner[:, :, j : j + 1]).transpose(1, 2) @ mixing
        row[:, :, j] += 1
        square = row @ inner @ row.transpose(1, 2)
        good = square > DEPENDENT * inner[:, j : j + 1, j : j + 1]
        mixing[:, j : j + 1] = torch.where(good, row * square.rsqrt(), 0.0)
    return [(mix @ matrix).float() for mix, matrix in zip(mixing, wide, strict=True)]


def _turned(rows: Tensor, old: Tensor) -> Tensor:
    """The next basis. A row that came out as zeros would stay so for ever: the old one is tried again."""
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, rows / largest, old)


def _undo(
    matrices: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor], others: Sequence[Tensor]
) -> Callable[[], None]:
    """Gives P Q^T back to the matrices, made again because nobody keeps it, and the others what they have now."""
    before = [tensor.clone() for tensor in others]

    def undo() -> None:
        for matrix, p, q in zip(matrices, left, right, strict=True):
            matrix.addmm_(p.t(), q)
        for tensor, old in zip(others, before, strict=True):
            tensor.copy_(old)

    return undo

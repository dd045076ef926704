"""Decoupled momentum, sent by its largest cosines: DeMo's steps 2 to 4 and 6 (Peng et al., arXiv:2411.19870)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codec.compact_bits import MASK, SPARE, deposit, fetch, signed, unsigned
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.fixed import Body, Fixed
from gradwire.methods.momentum_dct.cosine import CosineTiles, Group, components, tiles_of
from gradwire.methods.residual import Residual, WithResidual

LONGEST = 128  # side of a tile: its places then have 14 bits
AMPLITUDE = 0xFFFF  # the low bits of a field: bfloat16; what that rounds off stays in the momentum
AMPLITUDE_BITS = 16
LARGEST = 2.0**100  # that is sent of one component: sums of such are finite, and what is left of it waits


@dataclass(frozen=True)
class MomentumDCT(WithResidual, Fixed):
    """Sends the k largest cosine components of every tile of the momentum, and takes them from it.

    m = momentum * m + g;  q = the k components of DCT(m) that are largest, tile by tile;  m -= IDCT(q);
    decoded = IDCT(mean of q over the ranks), or its sign. m is what is held back: the state's residual.
    chunk: side of a tile at most (cosine.py): chunk x chunk elements of a matrix, chunk of a vector.
    k: components of a tile; momentum: decay of m, 1 is error feedback without decay.
    sign: the sign of the decoded mean is the result, as in the paper's optimizer.
    """

    chunk: int = 64
    k: int = 8
    momentum: float = 0.999
    sign: bool = False

    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, most in (("chunk", LONGEST), ("k", LONGEST**2)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"MomentumDCT: {name} must be a whole number in 1 .. {most}, got {value}")
        if not 0 < self.momentum <= 1:
            raise ValueError(f"MomentumDCT: momentum must be in (0, 1], got {self.momentum}")

    def body_words(self, layout: Layout) -> int:
        groups = tiles_of(layout, self.chunk).groups
        return -(-sum(self._n_fields(group) * _width(group) for group in groups) // 32)

    def write(self, grad: Tensor, state: Residual, context: Context) -> Body:
        tiles, residual = tiles_of(context.layout, self.chunk), state.residual
        self.accumulate(grad, state, context)
        before = residual.clone()
        coefficients = tiles.transform(context.only(before))
        coefficients.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LARGEST, LARGEST)  # a sum that is not finite is not sent
        taken = torch.zeros_like(coefficients)
        words = torch.zeros(self.body_words(context.layout) + SPARE, dtype=torch.int64, device=grad.device)
        for group, positions in self._fields(tiles, grad.device):
            rows = group.of(coefficients)
            places = rows.abs().topk(min(self.k, group.size), dim=1, sorted=False).indices
            amplitudes = rows.gather(1, places).bfloat16()
            group.of(taken).scatter_(1, places, amplitudes.float())
            fields = places << AMPLITUDE_BITS | amplitudes.view(torch.int16).long() & AMPLITUDE
            deposit(words, positions, fields.flatten())
        sent = tiles.inverse(taken, torch.empty_like(before))
        residual -= sent

        def undo() -> None:
            residual.copy_(before)

        return Body(signed(words[:-SPARE]), sent.abs().sum(), undo, components(tiles, self.k, grad.device))

    def accumulate(self, grad: Tensor, state: Residual, context: Context) -> None:
        """m = momentum * m + g, where there is a gradient."""
        if context.active is None:
            state.residual *= self.momentum
        else:
            state.residual *= context.layout.spread(torch.where(context.active, self.momentum, 1.0))
        state.residual += grad

    def read(self, bodies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """All ranks' components are added up, in rank order, before the one inverse transform."""
        tiles, device = tiles_of(context.layout, self.chunk), bodies.device
        coefficients = torch.zeros(context.layout.numel, device=device)
        broken, fields = torch.zeros(len(bodies), dtype=torch.bool, device=device), list(self._fields(tiles, device))
        for rank, body in enumerate(bodies):
            words = torch.cat([unsigned(body), body.new_zeros(SPARE, dtype=torch.int64)])
            for group, positions in fields:
                field = fetch(words, positions, _width(group)).view(group.count, -1)
                places, amplitudes = field >> AMPLITUDE_BITS, signed(field << 16 & MASK).view(torch.float32)
                wrong = (places >= group.size) | ~(amplitudes.abs() <= LARGEST)
                broken[rank] |= wrong.any()
                shares = (amplitudes * (1 / len(bodies))).masked_fill_(wrong, 0.0)
                flat = group.starts(device) + places.clamp_(max=group.size - 1)
                coefficients.index_add_(0, flat.flatten(), shares.flatten())
        return coefficients, broken

    def add_all(self, said: Tensor, out: Tensor, context: Context) -> None:
        tiles_of(context.layout, self.chunk).inverse(said, out)
        if self.sign:
            out.sign_()

    def _fields(self, tiles: CosineTiles, device: torch.device) -> Iterator[tuple[Group, Tensor]]:
        """The groups, and the bits at which their fields begin: amplitude and place of one component each."""
        begin = 0
        for group in tiles.groups:
            end = begin + self._n_fields(group) * _width(group)
            yield group, torch.arange(begin, end, _width(group), device=device)
            begin = end

    def _n_fields(self, group: Group) -> int:
        return group.count * min(self.k, group.size)


def _width(group: Group) -> int:
    """Bits of a field."""
    return AMPLITUDE_BITS + (group.size - 1).bit_length()

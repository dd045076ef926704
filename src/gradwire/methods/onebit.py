"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014; described in the survey of Tang et al., arXiv:2003.06307)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.arithmetic import signs
from gradwire.arithmetic.finite import unsound
from gradwire.arithmetic.groups import columns_of
from gradwire.codec import fields
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.fixed import Body, Fixed, split
from gradwire.methods.residual import WithResidual


@dataclass(frozen=True)
class OneBit(WithResidual, Fixed):
    """Sends the sign of every element and two values a column: the means of its positive and of its negative ones.

    p = r + g; sent = the mean of the column's p >= 0 where p >= 0, the mean of its p < 0 elsewhere; r = p - sent.

    A column is what belongs to one output unit: a row of torch's weight [O, ...]; a vector or a scalar is one column.
    On the wire: 1 bit an element and 64 bits a column, so 1 + 64 / L bits an element for columns of L: 1.02 for a 3x3
    convolution of 512 channels, 3.4 for one of the 3 colours, and for L <= 2 more than float32 takes.
    """

    alike: ClassVar[bool] = True

    def body_words(self, layout: Layout) -> int:
        return 2 * len(columns_of(layout)) + fields.n_words(layout.numel, 1)

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        columns = columns_of(context.layout)
        largest = signs.gather(grad, state.residual, columns)  # grad is p from here on
        sums, lengths = signs.sides(grad, largest, columns), columns.lengths(grad.device)
        n_above = lengths - sums.n_below
        # where there is no gradient both are 0: nothing is sent, and p - 0 is the r there was
        high = columns.active((sums.above / n_above.clamp(min=1)).float(), context.active)
        low = columns.active((sums.below / sums.n_below.clamp(min=1)).float(), context.active)
        norm = (high.double() * n_above + low.double() * sums.n_below).sum().float()
        low = -low
        bits = signs.settle(grad, high, low, False, state.residual, columns)
        words = torch.cat([high.view(torch.int32), low.view(torch.int32), bits])
        return Body(words, norm, lambda: state.residual.copy_(grad))

    def read(self, bodies: Tensor, context: Context) -> tuple[signs.Said, Tensor]:
        n_columns = len(columns_of(context.layout))
        values, bits = split(bodies, 2 * n_columns)
        high, low = values[:, :n_columns], values[:, n_columns:]
        share = 1 / len(bodies)
        return signs.Said(bits, high * share, low * share), unsound(torch.cat([high, -low], 1))

    def add_all(self, said: signs.Said, out: Tensor, context: Context) -> None:
        signs.add(*said, out, columns_of(context.layout))

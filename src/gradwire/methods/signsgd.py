"""Signs: EF-signSGD (Karimireddy et al., arXiv:1901.09847) and the majority vote (Bernstein et al., arXiv:1802.04434,
arXiv:1810.05291)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.arithmetic import signs
from gradwire.arithmetic.finite import unsound
from gradwire.arithmetic.groups import groups_of
from gradwire.codec import fields
from gradwire.layout import Layout
from gradwire.methods.base import Context, Nothing
from gradwire.methods.fixed import Body, Fixed, split
from gradwire.methods.residual import WithResidual


@dataclass(frozen=True)
class SignSGD(WithResidual, Fixed):
    """One bit an element: p = r + g; sent = mean|p| sign(p), the mean over the tensor; r = p - sent.

    feedback: False drops what was not sent, r = 0.
    vote: every element of the result is the sign that most workers have, 0 if as many have the other: +1, 0 or -1, so
        the learning rate is the size of a step. A tensor whose gradient is all zero does not vote. Nothing is held
        back: needs feedback=False.

    On the wire: 1 bit an element and 32 bits a tensor, with vote 1 bit a tensor. A bit cannot say zero: an element that
    is exactly 0 in a tensor that is not counts as + in even steps and as - in odd ones, so that it goes nowhere.
    """

    feedback: bool = True
    vote: bool = False

    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.feedback and self.vote:
            raise ValueError(
                "SignSGD: a majority vote has no size of which something could be held back: "
                "give SignSGD(feedback=False, vote=True), or leave vote out"
            )

    @property
    def holds_back(self) -> bool:
        return self.feedback

    def init(self, layout: Layout, device: torch.device) -> Any:
        return super().init(layout, device) if self.feedback else Nothing()

    def body_words(self, layout: Layout) -> int:
        return self._head_words(layout) + fields.n_words(layout.numel, 1)

    def _head_words(self, layout: Layout) -> int:
        """A scale a tensor, or a bit."""
        return fields.n_words(len(layout), 1) if self.vote else len(layout)

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        tensors, zero_below = groups_of(context.layout, None), context.step % 2 == 1
        largest = signs.gather(grad, state.residual if self.feedback else None, tensors)  # grad is p from here on
        lengths = tensors.lengths(grad.device)
        if self.vote:
            votes = tensors.active(largest, context.active) > 0
            return Body(torch.cat([fields.pack(votes, 1), signs.pack(grad, zero_below)]), (votes * lengths).sum())
        total = signs.magnitudes(grad, largest, tensors)
        # where there is no gradient the scale is 0: nothing is sent, and p - 0 is the r there was
        scale = tensors.active((total / lengths.clamp(min=1)).float(), context.active)
        norm = torch.dot(scale.double(), lengths.double()).float()
        if not self.feedback:
            return Body(torch.cat([scale.view(torch.int32), signs.pack(grad, zero_below)]), norm)
        bits = signs.settle(grad, scale, -scale, zero_below, state.residual, tensors)
        return Body(torch.cat([scale.view(torch.int32), bits]), norm, lambda: state.residual.copy_(grad))

    def read(self, bodies: Tensor, context: Context) -> tuple[signs.Said, Tensor]:
        scales, bits = split(bodies, self._head_words(context.layout))
        if self.vote:
            votes = scales.view(torch.int32)
            sizes = torch.stack([fields.unpack(row, 1, len(context.layout)) for row in votes]).float()
            return signs.Said(bits, sizes, -sizes), torch.zeros(len(bodies), dtype=torch.bool, device=bodies.device)
        sizes = scales * (1 / len(bodies))
        return signs.Said(bits, sizes, -sizes), unsound(scales)

    def add_all(self, said: signs.Said, out: Tensor, context: Context) -> None:
        signs.add(*said, out, groups_of(context.layout, None))
        if self.vote:
            out.sign_()

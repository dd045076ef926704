"""Methods whose messages are gathered and always of the same length: their head, bad values and the mean, in one place.

A method writes a body of 32-bit words and adds what another rank's body says to the mean. Here: a gradient that is not
finite, the head and its check, the order of the ranks.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import codec
from gradwire.arithmetic.finite import sifted
from gradwire.codec import header
from gradwire.layout import Layout
from gradwire.methods.base import Arrival, Context, Gather, Message

BROKEN = "does not hold what its method sends"


@dataclass
class Body:
    """What one rank sends of one bucket."""

    words: Tensor  # int32 [body_words(layout)]
    sent_norm: Tensor  # float32 [], |sent|_1
    undo: Callable[[], None] = lambda: None  # the state as it was before the send, with this step's gradient in it
    sent: Tensor | None = None  # integers [K], elements sent of each tensor; None: all of them


class Fixed(Gather):
    """A Gather method by four functions: body_words, write, read and add_all."""

    @abstractmethod
    def body_words(self, layout: Layout) -> int:
        """Length of a body."""

    @abstractmethod
    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        """grad float32 [N], finite, zeros in tensors without a gradient; `context.only` keeps these out of the send.

        A tensor of the method's own: it may work in it and keep it.
        """

    @abstractmethod
    def read(self, bodies: Tensor, context: Context) -> tuple[Any, Tensor]:
        """What the bodies [W, words] say, for `add_all`, and bool [W]: those that cannot be right.

        They may hold anything.
        """

    @abstractmethod
    def add_all(self, said: Any, out: Tensor, context: Context) -> None:
        """out, zeros, += the mean over the ranks, in their order, of what they said.

        On a GPU also of what cannot be right, as nobody has waited to know: nothing outside of `out` is touched.
        """

    def put(self, said: Any, out: Tensor, bad: Tensor, context: Context) -> None:
        """out = that mean; it stays as it is if bad []. On a CPU nothing comes here that is."""
        if out.device.type == "cpu":
            self.add_all(said, out.zero_(), context)
        else:
            self.add_all(said, mean := torch.zeros_like(out), context)
            torch.where(bad, out, mean, out=out)

    def accumulate(self, grad: Tensor, state: Any, context: Context) -> None:
        """In a step in which everything is sent: the gradient goes to what is held back."""
        state.residual += grad

    def encode(self, grad: Tensor, moment: Tensor, state: Any, context: Context) -> Message:
        good, finite = sifted(grad)
        good = good.clone() if good is grad and context.active is None else context.only(good)
        if context.dense:
            self.accumulate(good, state, context)
            body = Body(torch.empty(0, dtype=torch.int32, device=grad.device), good.new_zeros(()))
        else:
            body = self.write(good, state, context)
        if context.bare:
            return Message(body.words, body.undo, body.sent, None, body.sent_norm, finite)
        nothing = body.words.new_empty(0)  # the head of such a message tells of nothing by tensor
        parts = header.Parts(finite, nothing, nothing, nothing, None, body.words)
        data = codec.select(grad.device).seal(self._shape(context), context.step, parts)
        return Message(data, body.undo, body.sent, None, body.sent_norm)

    def decode(self, messages: Tensor, out: Tensor, context: Context) -> Arrival:
        """out = the mean over the ranks, in rank order; nothing changes on error."""
        if context.bare:
            return self._decode_bare(messages, out, context)
        shape = self._shape(context)
        problems = codec.select(out.device).inspect(messages, shape, context.step)
        if not context.dense:
            said, broken = self.read(messages[:, shape.body], context)
            problems = torch.cat([problems, broken[:, None]], 1)
        bad = problems.any()
        told = (*header.PROBLEMS, BROKEN)
        refuse = functools.partial(header.refuse, problems, told, messages, shape, context.step)
        if out.device.type == "cpu" and bad:
            refuse()
        if context.dense:
            out.masked_fill_(~bad, 0.0)
        else:
            self.put(said, out, bad, context)
        return Arrival((messages[:, 5] & 1).all(), None, bad, refuse)

    def _decode_bare(self, bodies: Tensor, out: Tensor, context: Context) -> Arrival:
        """Of bodies that nobody else has touched."""
        said, _ = self.read(bodies, context)
        self.add_all(said, out.zero_(), context)
        none = bodies.new_zeros((), dtype=torch.bool)
        return Arrival(~none, None, none, lambda: None)

    def words_in(self, context: Context) -> int:
        """Length of a body in this step."""
        return self.body_words(context.layout)

    def _shape(self, context: Context) -> header.Shape:
        return _shape(context.layout, 0 if context.dense else self.words_in(context), codec.CHUNK)


@functools.lru_cache(maxsize=256)  # both sides of an exchange ask for the same, and so does the next step
def _shape(layout: Layout, room: int, chunk: int) -> header.Shape:
    return header.Shape(layout, room, chunk, header.BARE)


def split(bodies: Tensor, n_scales: int) -> tuple[Tensor, Tensor]:
    """The scales with which bodies [W, words] begin, float32 [W, n_scales], and what is behind them; views of both."""
    return bodies[:, :n_scales].view(torch.float32), bodies[:, n_scales:]

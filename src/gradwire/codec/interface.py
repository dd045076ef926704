"""What every codec has: functions of the same names and results on all devices, what they pass, the constants.

r residual, v variance, g gradient, m second moment (sum of c_z^2); K tensors in a bucket of N elements, W ranks,
C chunks of 2^28 places. A word is one sent element: bit 31 the sign, 30..28 d, 27..0 the place within its chunk.
Where the rule has no use for v (alpha = 0), None stands in the place of v and m: nobody keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from gradwire.codec import header
from gradwire.codec.form import COMPACT, Blocks, Shape
from gradwire.layout import Layout

CHUNK = 1 << 28  # a word has 28 bits for the place: longer messages are cut into chunks of this many elements
NOTHING = -128  # the exponent of a tensor that sends nothing
SMALLEST = 2.0**-126  # below it float32 is denormal and devices differ: never sent
WINDOW = 7  # three bits of exponent below the tensor's own
ROUNDING = {"paper": 0x00400000, "unbiased": 0x004AFB0D}  # half a binade: 1.5 goes up; or a boundary at sqrt 2
GOLDEN = 0x9E3779B1  # consecutive steps start far apart
BROKEN = "does not hold what its directory says"
PROBLEMS = ("names places that are not in this bucket, or out of order", "has exponents below those of float32")


@dataclass(frozen=True)
class Rule:
    """What decides: r^2 > alpha v + floor^2, and with tau also |r| > tau.

    With a density the largest scores r^2 - alpha v > floor^2 of every tensor, about density n of n: see limits.py.
    """

    alpha: float
    zeta: float
    tau: float | None
    floor: float
    feedback: bool
    rounding: str
    density: float | None = None


class Inputs(NamedTuple):
    """What a bucket comes with: this step's gradient and moment, [N], and its state, which is changed in place."""

    grad: Tensor
    moment: Tensor | None
    residual: Tensor
    variance: Tensor | None
    active: Tensor | None = None  # bool [K]: tensors without a gradient are left alone; None: all have one


@dataclass
class Selection:
    """What one encode sends. Nothing here has to be waited for: how many there are is known on the device alone."""

    words: Tensor  # int32 [sum(capacity)], in ascending order of their place, zeros after the last
    counts: Tensor  # int32 [C], words of each chunk
    codes: Tensor  # int32 [K, 8], how many elements are sent with each d
    exponents: Tensor  # int32 [K], e_k or NOTHING
    passed: Tensor  # int32 [K], elements that asked for room; -1 for a tensor without a gradient
    finite: Tensor  # bool [], no bad gradient or moment
    undo: Callable[[], None]  # puts r and v of the sent elements back as they were before the send


class Codec(Protocol):
    """Steps 2 to 4 and 6: `encode` and `decode`, and of what they are made of that which others need by itself.

    `reference` is the definition; the others have its results bit for bit.
    """

    def encode(self, inputs: Inputs, shape: Shape, rule: Rule, step: int) -> tuple[Tensor, Selection]: ...

    def decode(self, messages: Tensor, shape: Shape, rule: Rule, step: int, out: Tensor) -> Tensor: ...

    # of virtual workers, whose messages nobody writes

    def select(
        self, inputs: Inputs, layout: Layout, rule: Rule, capacity: Sequence[int], step: int, chunk: int
    ) -> Selection: ...

    def add(
        self,
        words: Tensor,
        counts: Tensor,
        sound: Tensor,
        exponents: Tensor,
        layout: Layout,
        rule: Rule,
        chunk: int,
        out: Tensor,
    ) -> Tensor: ...

    # of AdaComp, which chooses for itself

    def pack(
        self, words: Tensor, counts: Tensor, codes: Tensor, blocks: Blocks, chunk: int
    ) -> tuple[Tensor, Tensor]: ...

    def unpack(
        self, orders: Tensor, bodies: Tensor, sound: Tensor, blocks: Blocks, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    # of messages of a fixed length

    def seal(self, shape: Shape, step: int, parts: header.Parts) -> Tensor: ...

    def inspect(self, messages: Tensor, shape: Shape, step: int) -> Tensor: ...


def problems_of(shape: Shape) -> tuple[str, ...]:
    """The names of what `decode` finds, in its order."""
    return header.PROBLEMS + (BROKEN,) * (shape.format == COMPACT) + PROBLEMS

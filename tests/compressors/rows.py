"""The methods of the contract suite: one row each, with what the method promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire import BF16, VGC, Dense
from gradwire.compressors import FP16


@dataclass(frozen=True)
class Row:
    """A method and its promises.

    conserves: how far decoded own + new residual may be from old residual + gradient, relative to the largest element;
        None with a reason in `why` where the method loses something on purpose.
    error: |decoded - gradient| / |gradient| of one worker's first step, from .. to: a method that does nothing fails.
    bits: a parameter of a large tensor at most, without the head.
    unbiased: the mean over many steps of one gradient, sent from a fresh state each time, is the gradient.
    odd: decode(encode(-g)) = -decode(encode(g)), bit for bit.
    learns: trains the small network of scenes.py by SGD; False where its steps are of another size.
    """

    compressor: Any
    conserves: float | None = None
    why: str = ""
    error: tuple[float, float] = (0.0, 1.0)
    bits: float = 32.0
    unbiased: bool = False
    odd: bool = True
    learns: bool = True


# VGC's own row says what the suite needs; its tests by the specification are in test_vgc.py.
ROWS: dict[str, Row] = {
    "dense": Row(Dense(), why="no state", error=(0.0, 0.0)),
    "bf16": Row(BF16(), why="no state", error=(1e-4, 4e-3), bits=16),
    "fp16": Row(FP16(), why="no state", error=(1e-5, 1e-3), bits=16),
    "vgc": Row(VGC(alpha=1.0), why="rounding is dropped", error=(0.05, 0.5), bits=12),
    "vgc feedback": Row(VGC(alpha=1.0, feedback=True), conserves=0.0, error=(0.05, 0.5), bits=12),
}

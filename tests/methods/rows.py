"""The methods of the contract suite: one row each, with what the method promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire import BF16, FP8, VGC, Dense, OneBit, PowerSGD, RandomK, SignSGD, TopK
from gradwire.methods import FP16, QSGD, AdaComp, ChunkTopK, MomentumDCT, Strom, TernGrad


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
    momentum, lr: of that SGD.
    """

    compressor: Any
    conserves: float | None = None
    why: str = ""
    error: tuple[float, float] = (0.0, 1.0)
    bits: float = 32.0
    unbiased: bool = False
    odd: bool = True
    learns: bool = True
    momentum: float = 0.9
    lr: float = 0.05


# VGC's own row says what the suite needs; its tests by the specification are in test_vgc.py.
ROWS: dict[str, Row] = {
    "dense": Row(Dense(), why="no state", error=(0.0, 0.0)),
    "bf16": Row(BF16(), why="no state", error=(1e-4, 4e-3), bits=16),
    "fp16": Row(FP16(), why="no state", error=(1e-5, 1e-3), bits=16),
    "fp8": Row(FP8(), why="no state", error=(0.015, 0.04), bits=8),
    "fp8 e5m2": Row(FP8(format="e5m2"), why="no state", error=(0.03, 0.08), bits=8),
    "onebit": Row(OneBit(), conserves=1e-6, error=(0.4, 0.8), bits=1 + 64 / 300),
    "signsgd": Row(SignSGD(), conserves=1e-6, error=(0.5, 0.9), bits=1),
    "signsgd no feedback": Row(SignSGD(feedback=False), why="no state", error=(0.5, 0.9), bits=1),
    "signsgd vote": Row(SignSGD(feedback=False, vote=True), why="no state", error=(0.9, 2.0), bits=1, learns=False),
    "strom": Row(Strom(tau=0.125), conserves=1e-7, error=(0.85, 0.9), bits=0.15),
    "strom words": Row(Strom(tau=0.01, wire="words"), conserves=1e-7, error=(0.985, 0.992), bits=0.5),
    "adacomp": Row(AdaComp(), conserves=1e-6, error=(0.75, 0.82), bits=0.15),
    "chunk_topk": Row(ChunkTopK(), conserves=1e-7, error=(0.8, 0.98), bits=10.2 / 64),
    "chunk_topk 3 bits": Row(ChunkTopK(256, 16, 3), conserves=1e-7, error=(0.6, 0.9), bits=0.75),
    "chunk_topk signs": Row(ChunkTopK(500, 10, 1), conserves=1e-7, error=(0.7, 0.95), bits=0.2),
    "momentum_dct": Row(MomentumDCT(k=32), why="momentum decays", error=(0.8, 0.86), bits=0.24),
    "momentum_dct feedback": Row(MomentumDCT(8, 4, momentum=1.0), conserves=1e-6, error=(0.78, 0.84), bits=1.4),
    "momentum_dct sign": Row(MomentumDCT(sign=True), why="only a sign", error=(1.3, 1.8), bits=0.06, learns=False),
    "powersgd": Row(PowerSGD(), conserves=1e-6, error=(0.7, 0.9), bits=32 * 4 * 1300 / 300000),
    "powersgd rank 1": Row(PowerSGD(rank=1), conserves=1e-6, error=(0.8, 0.95), bits=32 * 1300 / 300000),
    "powersgd cold": Row(PowerSGD(2, warm_start=False, min_compression=1.0), conserves=1e-6, error=(0.8, 0.95), bits=1),
    "qsgd": Row(QSGD(), why="no state", error=(1.0, 2.0), bits=4 + 32 / 512, unbiased=True),
    "qsgd 2 bits": Row(QSGD(2, 128), why="no state", error=(1.0, 4.0), bits=2 + 32 / 128, unbiased=True),
    "qsgd max": Row(QSGD(3, norm="max"), why="no state", error=(0.2, 0.6), bits=3.2 + 32 / 512, unbiased=True),
    "randomk": Row(RandomK(density=0.25), conserves=0.0, error=(0.8, 0.95), bits=8),
    "randomk 1 in 100": Row(RandomK(seed=3), conserves=0.0, error=(0.97, 1.0), bits=0.32, learns=False),
    "terngrad": Row(TernGrad(), why="no state", error=(0.8, 1.5), bits=1.6),
    "terngrad unbiased": Row(TernGrad(clip=None), why="no state", error=(1.0, 2.0), bits=1.6, unbiased=True),
    "topk": Row(TopK(), conserves=0.0, error=(0.8, 0.98), bits=0.406),
    "topk exact": Row(TopK(ratio=20, exact=True), conserves=0.0, error=(0.6, 0.9), bits=1.92),
    "topk dgc": Row(
        TopK(density=0.05, momentum=0.9, clip=4.0, warmup=4),
        why="the velocity goes into r and leaves it",
        error=(0.3, 0.9),
        bits=9.0,
        momentum=0.0,
        lr=0.3,
    ),
    "vgc": Row(VGC(alpha=1.0), why="rounding is dropped", error=(0.05, 0.5), bits=12),
    "vgc feedback": Row(VGC(alpha=1.0, feedback=True), conserves=0.0, error=(0.05, 0.5), bits=12),
    "vgc budget": Row(VGC(0.5, feedback=True, max_bytes_per_step=9000), conserves=0.0, error=(0.05, 0.5), bits=12),
    "vgc momentum": Row(
        VGC(alpha=0.01, momentum=0.9), why="rounding is dropped", error=(0.05, 0.5), bits=12, momentum=0.0, lr=0.3
    ),
    "vgc rate": Row(VGC(alpha=1.0, budget="6.25MB/s"), why="rounding is dropped", error=(0.05, 0.5), bits=12),
    "vgc density": Row(VGC(alpha=0.5, feedback=True, density=0.05), conserves=0.0, error=(0.7, 0.85), bits=0.2),
}

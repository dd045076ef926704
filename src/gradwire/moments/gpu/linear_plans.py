"""Step 1, moments: which Linears a kernel of their own is worth it for, and how it cuts their shapes. No Triton here.

A plan follows from a cost model, whose numbers were measured on an H200, and is remembered by the process. Nothing is
timed while a model trains.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gradwire.moments.gpu.chip import HALVES, chip
from gradwire.moments.gpu.tile_shares import shares

TILE = 128
# H200, bfloat16, 1024 x 1024: pairs of rows take 5.6 dW at T = 6 and 7.4 at 8, the kernel 7.4 and 6.0
FEW_POSITIONS = 6


@dataclass(frozen=True)
class LinearPlan:
    """How Hopper's kernel runs one shape.

    step, stages, group: positions a step, buffers in the ring, columns of tiles in a band.
    programs, whole, share: `whole` tiles go round `programs`; the others are cut into parts of `share` samples.
    """

    step: int = 64
    stages: int = 6
    group: int = 16
    programs: int = 1
    whole: int = 0
    share: int = 1


@functools.cache
def plan_for(samples: int, positions: int, outputs: int, inputs: int, programs: int) -> LinearPlan:
    """Short samples get short steps, because zeros would be multiplied too."""
    step = next((size for size in (16, 32) if positions <= size), 64)
    tiles = -(-outputs // TILE) * -(-inputs // TILE)
    whole, share = shares(tiles, samples, positions, programs, launch_us=8.0, most_parts=16)
    return LinearPlan(step=step, stages=6 * 64 // step, programs=programs, whole=whole, share=share)


def worth_it(samples: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel beats `bmm`, square and sum there. Measured on an H200 only; elsewhere no.

    A call costs the host some 100 microseconds: layers whose per-sample gradients are written and read in less are not
    worth it.
    """
    return chip(device)[0] == 9 and dtype in HALVES and samples * outputs * inputs >= 2**23

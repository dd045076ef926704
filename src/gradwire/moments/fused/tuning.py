"""Step 1, moments: which fused kernel a Linear's shape gets, and whether it gets one at all. Imports no Triton.

A plan follows from a cost model, whose numbers were measured on an H200, and is remembered by the process. Nothing is
timed while a model trains.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

TILE = 128
HALVES = (torch.bfloat16, torch.float16)
FEW_POSITIONS = (
    6  # H200, bfloat16, 1024 x 1024: pairs of rows take 5.6 dW at T = 6 and 7.4 at 8, the kernel 7.4 and 6.0
)


@dataclass(frozen=True)
class Shape:
    """B samples, T positions, O outputs, I inputs."""

    samples: int
    positions: int
    outputs: int
    inputs: int

    @property
    def tiles(self) -> int:
        return -(-self.outputs // TILE) * -(-self.inputs // TILE)


@dataclass(frozen=True)
class Plan:
    """One way to run one shape.

    way: `hopper` (hopper.py), `tiles` (linear.py), `products` (products.py).
    step, stages, group: positions a step, buffers in the ring, columns of tiles in a band.
    programs, whole, share: `whole` tiles go round `programs`; the others are cut into parts of `share` samples.
    rows, columns, warps, split: the tile of `tiles`, its warps, and into how many parts it cuts the samples.
    """

    way: str
    step: int = 64
    stages: int = 6
    group: int = 16
    programs: int = 1
    whole: int = 0
    share: int = 1
    rows: int = TILE
    columns: int = TILE
    warps: int = 8
    split: int = 1


def spread(shape: Shape, programs: int) -> tuple[int, int]:
    """(whole, share): how many tiles run whole, and how many samples a part of the others has; the cheapest by a model.

    144 tiles (3072 x 768) on 132 multiprocessors would take two rounds; 132 whole and 12 in eighths take 1.125.
    """
    sample_us = 5.4e-3 * shape.positions + 0.3  # H200: one sample of a 128 x 128 tile
    best = (-(-shape.tiles // programs) * shape.samples * sample_us, shape.tiles, shape.samples)
    for rounds in range(max(0, shape.tiles // programs - 1), shape.tiles // programs + 1):
        rest = shape.tiles - rounds * programs
        for n_parts in range(2, min(shape.samples, 16) + 1) if rest else ():
            share = -(-shape.samples // n_parts)
            total = rest * -(-shape.samples // share)
            join_us = 8.0 + 0.1 * total  # a launch, 128 kB a part written and read, less shared in L2
            turns = rounds * shape.samples + -(-total // programs) * share
            best = min(best, (turns * sample_us + join_us, rounds * programs, share))
    return best[1], best[2]


def hopper_plan(shape: Shape, programs: int) -> Plan:
    """Hopper's kernel: short samples get short steps, because zeros would be multiplied too."""
    step = next((size for size in (16, 32) if shape.positions <= size), 64)
    whole, share = spread(shape, programs)
    return Plan("hopper", step=step, stages=6 * 64 // step, programs=programs, whole=whole, share=share)


def tiles_plan(shape: Shape, programs: int) -> Plan:
    """The kernel for everything else that has matrix units."""
    split = max(1, min(shape.samples, 2 * programs // shape.tiles))
    step = 32 if shape.positions <= 32 else 64
    return Plan("tiles", step=step, stages=3, programs=programs, split=split)


def refusal(gradient: torch.Tensor, x: torch.Tensor) -> str | None:
    """Why no fused kernel can take these tensors; None if one can."""
    if gradient.ndim != x.ndim or x.ndim not in (2, 3) or gradient.shape[:-1] != x.shape[:-1]:
        shapes = f"{list(gradient.shape)} and {list(x.shape)}"
        return f"expected gradient [B, T, O] and x [B, T, I], or [B, O] and [B, I], got {shapes}"
    if gradient.dtype != x.dtype or x.dtype not in (*HALVES, torch.float32):
        return f"expected one dtype of bfloat16, float16, float32, got {gradient.dtype} and {x.dtype}"
    if gradient.device != x.device:
        return f"expected one device, got {gradient.device} and {x.device}"
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"expected a CUDA device, got {x.device}"
    return None


def worth_it(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the operator beats `bmm`, square and sum there. Measured on an H200 only; elsewhere no.

    A call costs the host some 100 microseconds: layers whose per-sample gradients are written and read in less are not
    worth it. float32: 3.1 ms for 3072 x 768, where bmm, square and sum take 0.5 with tf32 and 1.7 without.
    """
    if chip(device)[0] != 9 or dtype not in HALVES:
        return False
    return shape.samples * shape.outputs * shape.inputs >= 2**23


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """(major capability, multiprocessors); a CPU, which only Triton's interpreter uses, counts as a small old chip."""
    if device.type != "cuda":
        return 8, 2
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


@functools.cache
def plan_for(shape: Shape, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for a shape on a device; remembered."""
    major, programs = chip(device)
    if shape.positions <= FEW_POSITIONS:
        return Plan("products")
    if major != 9 or dtype not in HALVES:
        return tiles_plan(shape, programs)
    return hopper_plan(shape, programs)

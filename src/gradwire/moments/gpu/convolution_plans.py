"""Step 1, moments: which tile, how many programs and which loop a fused convolution gets, by its shape. No Triton here.

The rules are fitted to a sweep of every convolution of ResNet-50 and of the CIFAR VGG at B 64 on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

SLOTS = 4 * 132  # programs of four warps that an H200 runs at once


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution as the kernel sees it: sizes of one sample, [height, width, channels] -> [positions, outputs]."""

    samples: int
    groups: int
    channels: int  # in a group
    outputs: int  # in a group
    height: int
    width: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def positions(self) -> int:
        return self.out_height * self.out_width

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def elements(self) -> int:
        return self.groups * self.outputs * self.taps * self.channels

    @property
    def paired(self) -> bool:
        """Stride 2 over few channels: two pixels of four channels are one of eight, which 16-byte loads can take."""
        return self.stride[1] == 2 and self.width % 2 == 0 and self.dilation[1] == 1

    @property
    def pointwise(self) -> bool:
        return self.taps == 1 and self.stride == (1, 1) and self.padding == (0, 0)


Way: TypeAlias = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], None]  # gradient, x -> both results


@dataclass(frozen=True)
class TilePlan:
    """How the kernel that runs everywhere cuts a shape: tile, loop and shares of the work.

    steps: blocks of positions a sample, unrolled; 0: a loop. flat: channels a tap where columns run over taps; 0: one
    tap a tile. splits: ranges of samples. parts: every sample alone, its positions in so many; 0: samples together.
    """

    block_o: int
    block_i: int
    block_k: int
    stages: int
    splits: int = 1
    parts: int = 0
    steps: int = 0
    flat: int = 0

    def tiles(self, geometry: ConvolutionShape) -> tuple[int, int]:
        """(tiles along outputs, tiles along columns)."""
        if self.flat:
            columns = math.ceil(geometry.taps * self.flat / self.block_i)
        else:
            columns = geometry.taps * math.ceil(geometry.channels / self.block_i)
        return math.ceil(geometry.outputs / self.block_o), columns


def power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def stem_plan(geometry: ConvolutionShape, wide: bool) -> TilePlan:
    """Fewer than four channels: columns run over taps and channels, a sample's positions in parts."""
    columns = geometry.kernel[0] * (4 * geometry.kernel[1] + 4 * geometry.paired)
    block_i = 256 if columns > 128 else 64
    tiles = math.ceil(geometry.outputs / 64) * math.ceil(columns / block_i)
    parts = max(1, min(8, geometry.positions // 512, 132 // max(1, tiles * geometry.samples)))
    flat = 8 if geometry.paired else 4
    return TilePlan(64, 64 if wide else block_i, 32 if wide else 64, 3 if wide else 4, parts=parts, flat=flat)


def plan_for(geometry: ConvolutionShape, wide: bool) -> TilePlan:
    """The plan of the kernel that runs everywhere; wide: float32, whose tiles are smaller."""
    if geometry.channels < 4:
        return stem_plan(geometry, wide)
    block_o = 32 if wide else max(16, min(64, power_of_two(geometry.outputs)))
    block_i = max(16, min(128 if wide else 64, power_of_two(geometry.channels)))
    block_k = 16 if geometry.positions <= 16 else 32 if wide or geometry.positions <= 32 else 64
    stages = 3 if wide else 5 if block_k == 16 else 4
    steps = math.ceil(geometry.positions / block_k)
    flat = 64 if not wide and geometry.channels == 64 and geometry.taps > 1 else 0
    plan = TilePlan(block_o, block_i, block_k, stages, flat=flat, steps=steps if steps * block_k <= 64 else 0)
    tiles = math.prod(plan.tiles(geometry))
    splits = max(1, min(geometry.samples, SLOTS // (2 if wide else 1) // max(1, tiles)))
    if splits >= 48 and geometry.positions > 64:
        return replace(plan, parts=1, steps=0)
    return replace(plan, splits=splits)

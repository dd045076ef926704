"""The whole gradient, summed in one precision: plain DDP, and the honest baselines of half the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.methods.base import Sum


@dataclass(frozen=True)
class Dense(Sum):
    """All-reduce of the gradient as it is (float32 for a float32 model): plain DDP, bit for bit, and the fallback."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@dataclass(frozen=True)
class BF16(Sum):
    """All-reduce in bfloat16: each rank rounds g / W, the sum is rounded at every addition."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


@dataclass(frozen=True)
class FP16(Sum):
    """All-reduce in float16: each rank rounds g / W, the sum is rounded at every addition; above 65,504 it is inf."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

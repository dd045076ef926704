"""The whole gradient in its own precision: plain DDP, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.methods.base import Sum


@dataclass(frozen=True)
class Dense(Sum):
    """All-reduce of the gradient as it is (float32 for a float32 model): the baseline and the fallback."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

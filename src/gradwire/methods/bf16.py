"""The whole gradient in bfloat16: the honest baseline, half the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.methods.base import Sum


@dataclass(frozen=True)
class BF16(Sum):
    """All-reduce in bfloat16: each rank rounds g / W, the sum is rounded at every addition."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

"""The whole gradient in float16: half the bytes of float32, with a range that a large sum can leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.methods.base import Sum


@dataclass(frozen=True)
class FP16(Sum):
    """All-reduce in float16: each rank rounds g / W, the sum is rounded at every addition; above 65,504 it is inf."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

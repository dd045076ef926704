"""The whole gradient in bfloat16: the honest baseline, half the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class BF16:
    """All-reduce in bfloat16: each rank rounds g / W, the sum is rounded at every addition."""

    needs_moments: ClassVar[bool] = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

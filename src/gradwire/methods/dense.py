"""The whole gradient in its own precision: plain DDP, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Dense:
    """All-reduce of the gradient as it is (float32 for a float32 model): the baseline and the fallback."""

    needs_moments: ClassVar[bool] = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

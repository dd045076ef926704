"""Loss and score of the classification tasks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy; outputs [B, classes], targets [B]."""
    return F.cross_entropy(outputs, targets)


def count_right(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """float64 [2]: how many of these are classified right, and how many there are."""
    right = (model(inputs).argmax(dim=1) == targets).sum()
    return torch.stack([right, torch.tensor(len(targets), device=right.device)]).double()


def accuracy(totals: Tensor) -> dict[str, float]:
    """The share classified right."""
    return {"test_accuracy": float(totals[0] / totals[1])}

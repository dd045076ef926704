"""What tasks of images in classes have in common: four tensors, a network, cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Classification:
    """Images lie as they were read, often as bytes, and become inputs of the network batch by batch."""

    name: str
    images: Tensor
    targets: Tensor
    test_images: Tensor
    test_targets: Tensor
    digest: str  # of the data
    network: Callable[[], nn.Module]
    inputs_of: Callable[[Tensor], Tensor] = torch.Tensor.float
    test_batch: Mapping[str, int] | None = None  # images that are tested at once, by device; None: all
    scores: tuple[str, ...] = ("test_accuracy",)

    @property
    def samples(self) -> int:
        return len(self.targets)

    def fingerprint(self) -> str:
        return self.digest

    def on(self, device: torch.device) -> Classification:
        names = ("images", "targets", "test_images", "test_targets")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def make_model(self) -> nn.Module:
        return self.network()

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs_of(self.images[indices]), self.targets[indices]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, share: slice = slice(None)) -> Tensor:
        """float64 [2]: how many are classified right, and how many there are."""
        device = next(model.parameters()).device
        images, targets = self.test_images[share], self.test_targets[share]
        at_once = self.test_batch[device.type] if self.test_batch else max(1, len(targets))
        right = torch.zeros((), dtype=torch.int64, device=device)
        for some, wanted in zip(torch.split(images, at_once), torch.split(targets, at_once), strict=True):
            if len(wanted):  # more workers than images leave some without any
                found = model(self.inputs_of(some.to(device))).argmax(dim=1)
                right += (found == wanted.to(device)).sum()
        return torch.stack([right, torch.tensor(len(targets), device=device)]).double()

    def score(self, totals: Tensor) -> dict[str, float]:
        return {"test_accuracy": float(totals[0] / totals[1])}

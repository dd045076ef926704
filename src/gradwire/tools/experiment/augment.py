"""The usual augmentation of small images, on whatever device they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 4


def crop_and_flip(images: Tensor) -> Tensor:
    """[N, C, H, W]: each moved by up to 4 pixels, zeros coming in, and every other one mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    moved = torch.randint(0, 2 * PAD + 1, (2, count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    across = torch.arange(width, device=device)
    rows = moved[0] + torch.arange(height, device=device)
    columns = moved[1] + torch.where(mirrored, across.flip(0), across)
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return F.pad(images, [PAD] * 4)[image, channel, rows[:, None, :, None], columns[:, None, None, :]]

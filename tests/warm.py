"""Has the CPU kernels compiled once, before many test processes at the same time each compile their own."""

from __future__ import annotations

import torch
from torch import nn

from compressors.rows import ROWS
from gradwire import VGC
from gradwire.layout import Layout
from gradwire.moments import Recorder
from gradwire.ranks import Ranks


def compile_kernels() -> None:
    layout = Layout.of([("weight", (50, 40)), ("bias", (40,))])
    words = [VGC(alpha=1.0, wire="words"), VGC(alpha=1.0, tau=0.1, wire="words"), VGC(alpha=1.0, tau=0.1)]
    for compressor in [*words, *(row.compressor for row in ROWS.values())]:
        ranks = Ranks(compressor, layout, 2)
        for rooms in (None, (500, 10)):
            ranks.rooms = rooms
            for undo in ranks([torch.randn(layout.numel) for _ in range(2)]).undo:
                undo()
    normed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2), nn.Linear(36, 5))
    model = nn.Sequential(normed, nn.LayerNorm(5), nn.RMSNorm(5))
    recorder = Recorder(model, dict(model.named_parameters()))
    model(torch.randn(16, 3, 8, 8)).square().sum().backward()
    recorder.remove()

"""Has the CPU kernels compiled once, before many test processes at the same time each compile their own."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from gradwire import VGC
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.moments import Recorder
from methods.rows import ROWS


def compile_kernels() -> None:
    """In two processes: half a minute of compiling in a fresh checkout."""
    half = subprocess.Popen([sys.executable, __file__])
    compile_moments()
    compile_methods(needing_room=True)
    half.wait()


def compile_methods(needing_room: bool) -> None:
    """The methods whose messages follow the counts, or all others: what both halves need would be compiled twice."""
    layout = Layout.of([("weight", (50, 40)), ("bias", (40,))])
    words = [VGC(alpha=1.0, wire="words"), VGC(alpha=1.0, tau=0.1, wire="words"), VGC(alpha=1.0, tau=0.1)]
    for compressor in [*words, *(row.compressor for row in ROWS.values())]:
        if compressor.needs_room != needing_room:
            continue
        ranks = InProcess(compressor, layout, 2)
        for rooms in (None, (500, 10)):
            ranks.rooms = rooms
            for undo in ranks([torch.randn(layout.numel) for _ in range(2)]).undo:
                undo()


def compile_moments() -> None:
    normed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2), nn.Linear(36, 5))
    model = nn.Sequential(normed, nn.LayerNorm(5), nn.RMSNorm(5))
    recorder = Recorder(model, dict(model.named_parameters()))
    model(torch.randn(16, 3, 8, 8)).square().sum().backward()
    recorder.remove()


if __name__ == "__main__":
    compile_methods(needing_room=False)

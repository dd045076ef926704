"""Has the CPU kernels compiled once, before many test processes at the same time each compile their own."""

from __future__ import annotations

import torch
from torch import nn

from gradwire import VGC
from gradwire.compressors import Context
from gradwire.layout import Layout
from gradwire.moments import Recorder


def compile_kernels() -> None:
    layout = Layout.of([("weight", (50, 40)), ("bias", (40,))])
    for wire in ("compact", "words"):
        for compressor in (VGC(alpha=1.0, wire=wire), VGC(alpha=1.0, tau=0.1, wire=wire)):
            state = compressor.init(layout, torch.device("cpu"))
            for step in range(2):
                grad, context = torch.randn(layout.numel), Context(layout, step, (500, 10))
                message = compressor.encode(grad, grad.square() * 0.5, state, context)
                compressor.decode(message.data[None], torch.empty(layout.numel), context)
                message.undo()
    normed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2), nn.Linear(36, 5))
    model = nn.Sequential(normed, nn.LayerNorm(5), nn.RMSNorm(5))
    recorder = Recorder(model, dict(model.named_parameters()))
    model(torch.randn(16, 3, 8, 8)).square().sum().backward()
    recorder.remove()

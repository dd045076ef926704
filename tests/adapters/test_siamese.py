"""A Siamese net: two forward passes before one backward are one pass of the same samples, on the wire too."""

from __future__ import annotations

import contextlib
import io

import torch
from torch import nn

import gradwire
import scenes
from gradwire import VGC


class AtOnce(nn.Module):
    """Both pictures of a pair in one forward pass."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, one, other):
        return self.net(torch.stack([one, other], 1)).unbind(1)


def contrastive(one, other, same):
    """Pairs of a kind are drawn together, others are pushed apart."""
    distance = (one - other).square().sum(1)
    return torch.where(same, distance, (2 - (distance + 1e-6).sqrt()).relu().square()).mean()


def trained(at_once, n_steps=30):
    net = scenes.net()
    model = scenes.ddp(AtOnce(net) if at_once else net)
    wire = gradwire.attach(model, VGC(alpha=1.0), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(n_steps):
        (one, labels), (other, others) = scenes.batch(2 * step, size=32), scenes.batch(2 * step + 1, size=32)
        optimizer.zero_grad()
        both = model(one, other) if at_once else (model(one), model(other))
        contrastive(*both, labels == others).backward()
        optimizer.step()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        wire.coverage()
    return wire.stats(), printed.getvalue().splitlines()[0], scenes.digest(model.parameters())


def test_two_passes_send_what_one_pass_sends(spawn):
    apart, at_once = spawn(2, trained, False), spawn(2, trained, True)
    assert apart[0][2] == apart[1][2]  # the replicas
    stats, said, _ = apart[0]
    assert said == "samples: 32, axis 0 of the first input `input`"
    assert at_once[0][1] == "samples: 32, axis 0 of the first input `one`"
    # taken for separate samples: a ratio of 3.4 and a delay of 4.1, where it is 2.9 and 2.6. Rounding decides a few
    assert abs(stats.ratio / at_once[0][0].ratio - 1) < 0.05
    assert abs(stats.delay / at_once[0][0].delay - 1) < 0.1

"""Two attached models in one process: a GAN, whose generator's loss runs through the discriminator."""

from __future__ import annotations

import torch
from torch import nn

import gradwire
import scenes
from gradwire import VGC


def gan(remedy):
    torch.manual_seed(0)
    generator = scenes.ddp(nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 12)))
    discriminator = scenes.ddp(scenes.net())
    g_wire = gradwire.attach(generator, VGC(alpha=1.0))
    d_wire = gradwire.attach(discriminator, VGC(alpha=1.5))
    g_optimizer, d_optimizer = scenes.sgd(generator, 0.01), scenes.sgd(discriminator, 0.01)
    prints = []
    for step in range(6):
        x, y = scenes.batch(step)
        noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        d_optimizer.zero_grad()
        fake = generator(noise)
        # one backward for both halves: two forward passes, whose samples are taken for pairs
        loss = nn.functional.cross_entropy(discriminator(x), y) + discriminator(fake.detach()).square().mean()
        loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        if remedy == "frozen":
            discriminator.requires_grad_(False)
            (-discriminator.module(fake).square().mean()).backward()
            discriminator.requires_grad_(True)
        elif remedy == "no_sync":
            with discriminator.no_sync():
                (-discriminator(fake).square().mean()).backward()
        else:
            (-discriminator(fake).square().mean()).backward()
        g_optimizer.step()
        prints.append(scenes.digest([*generator.parameters(), *discriminator.parameters()]))
    return prints, g_wire.steps, d_wire.steps


def test_both_models_train_side_by_side(spawn):
    frozen, quiet = spawn(2, gan, "frozen"), spawn(2, gan, "no_sync")
    for results in (frozen, quiet):
        assert results[0] == results[1]
        assert results[0][1:] == (6, 6)
        assert len(set(results[0][0])) == 6
    assert frozen[0][0] == quiet[0][0]  # either remedy keeps the foreign gradient out


def refused():
    try:
        gan("none")
    except Exception as error:
        return str(error)
    return "no error"


def test_without_a_remedy_it_is_refused(spawn):
    for message in spawn(2, refused):
        assert "second synced backward" in message

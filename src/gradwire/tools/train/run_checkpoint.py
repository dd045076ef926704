"""Save a run and go on with it, bit for bit. Everything loads with weights_only=True: nothing is unpickled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.simulation import random_state as randomness
from gradwire.state import manifest
from gradwire.state.durable_files import write_atomic
from gradwire.tools.train.loop import Trainer
from gradwire.tools.train.metrics import RunState
from gradwire.tools.train.run_directory import LATEST, Checkpoint, checkpoint_path

TRAINING, WIRE = "training.pt", "wire"


def save(trainer: Trainer, out: Path) -> None:
    """All ranks: write a new checkpoint beside the old one, make it the latest, then remove the old one.

    1 everything into a folder whose name nobody looks for   2 force it to the disk, rename   3 `latest` names it
    """
    group, state = trainer.group, trainer.gather_state()
    final = checkpoint_path(out, state.epoch, state.step)
    unfinished = final.with_name(f"{final.name}.unfinished")
    if group.leads:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    group.barrier()
    gradwire.save(trainer.wire, unfinished / WIRE)
    generators = group.gather(randomness.get_state(group.device)).cpu()
    if group.leads:
        content = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "standing": state.to_plain(),
            "generators": generators,
        }
        torch.save(content, unfinished / TRAINING)
        manifest.seal(unfinished, workers=group.world, epoch=state.epoch, step=state.step)
        publish(unfinished, final)
    group.barrier()


def publish(unfinished: Path, final: Path) -> None:
    """Give the checkpoint its name, point to it, and remove all others."""
    os.replace(unfinished, final)
    write_atomic(final.parent / LATEST, final.name + "\n")
    for other in final.parent.glob("epoch-*"):
        if other != final:
            shutil.rmtree(other)


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """All ranks: put the trainer back where it was."""
    content: dict[str, Any] = torch.load(checkpoint / TRAINING, map_location="cpu", weights_only=True)
    trainer.model.load_state_dict(content["model"])
    trainer.optimizer.load_state_dict(content["optimizer"])
    gradwire.load(trainer.wire, checkpoint / WIRE)
    trainer.state = RunState.from_plain(content["standing"])
    generators, group = content["generators"], trainer.group
    if len(generators) == group.world:
        randomness.set_state(generators[group.rank], group.device)
    else:
        randomness.seed_worker(trainer.plan.settings.seed, group.rank, trainer.state.step)


def describe(checkpoint: Checkpoint, workers: int) -> str:
    """What is said when a run goes on."""
    text = f"going on after epoch {checkpoint.epoch}, step {checkpoint.step}"
    if checkpoint.workers != workers:
        text += f"; the state of {checkpoint.workers} workers is carried over to {workers}"
    return text

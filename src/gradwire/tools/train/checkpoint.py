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
from gradwire.state.files import write_atomic
from gradwire.tools.train.loop import Trainer
from gradwire.tools.train.run_directory import LATEST, Checkpoint, checkpoint_path
from gradwire.tools.train.standing import Standing

TRAINING, WIRE = "training.pt", "wire"


def save(trainer: Trainer, out: Path) -> None:
    """All ranks: write a new checkpoint beside the old one, make it the latest, then remove the old one.

    1 everything into a folder whose name nobody looks for   2 force it to the disk, rename   3 `latest` names it
    """
    team, standing = trainer.team, trainer.gather_standing()
    final = checkpoint_path(out, standing.epoch, standing.step)
    unfinished = final.with_name(f"{final.name}.unfinished")
    if team.leads:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    team.barrier()
    gradwire.save(trainer.wire, unfinished / WIRE)
    generators = team.gather(randomness.get_state(team.device)).cpu()
    if team.leads:
        content = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "standing": standing.to_plain(),
            "generators": generators,
        }
        torch.save(content, unfinished / TRAINING)
        write_manifest(unfinished, standing, team.world)
        publish(unfinished, final)
    team.barrier()


def write_manifest(folder: Path, standing: Standing, workers: int) -> None:
    """List every file with its digest, all of it on the disk, and say where the run stands."""
    manifest.seal(folder, workers=workers, epoch=standing.epoch, step=standing.step)


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
    trainer.standing = Standing.from_plain(content["standing"])
    generators, team = content["generators"], trainer.team
    if len(generators) == team.world:
        randomness.set_state(generators[team.rank], team.device)
    else:
        randomness.seed_worker(trainer.plan.seed, team.rank, trainer.standing.step)


def describe(checkpoint: Checkpoint, workers: int) -> str:
    """What is said when a run goes on."""
    text = f"going on after epoch {checkpoint.epoch}, step {checkpoint.step}"
    if checkpoint.workers != workers:
        text += f"; the state of {checkpoint.workers} workers is carried over to {workers}"
    return text

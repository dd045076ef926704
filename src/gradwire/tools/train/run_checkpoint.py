"""Save a run and go on with it, bit for bit. Everything loads with weights_only=True: nothing is unpickled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    if trainer.local is not None:
        torch.save(own_state(trainer), unfinished / worker_file(group.rank))
    generators = group.gather(randomness.get_state(group.device)).cpu()
    if group.leads:  # the others have written their files: all have come to the gathering above
        content: dict[str, Any] = {"standing": state.to_plain(), "generators": generators}
        with trainer.shared_weights():
            content["model"] = copied(trainer.model.state_dict())
        if trainer.local is None:
            content["optimizer"] = trainer.optimizer.state_dict()
        torch.save(content, unfinished / TRAINING)
        manifest.seal(unfinished, workers=group.world, epoch=state.epoch, step=state.step)
        publish(unfinished, final)
    group.barrier()


def worker_file(rank: int) -> str:
    """Of what by local steps each worker has for itself; of its weights in mid-round the wire takes care."""
    return f"worker-{rank:05d}.pt"


def own_state(trainer: Trainer) -> dict[str, Any]:
    """The optimizer's moments, and the buffers of the model: no other worker has the same."""
    return {"optimizer": trainer.optimizer.state_dict(), "buffers": dict(trainer.model.named_buffers())}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As it is now: the model goes on in the same memory."""
    return {name: tensor.clone() for name, tensor in state.items()}


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
    if trainer.local is None:
        trainer.optimizer.load_state_dict(content["optimizer"])
    else:
        restore_own(trainer, checkpoint)
    gradwire.load(trainer.wire, checkpoint / WIRE)
    trainer.state = RunState.from_plain(content["standing"])
    generators, group = content["generators"], trainer.group
    if len(generators) == group.world:
        randomness.set_state(generators[group.rank], group.device)
    else:
        randomness.seed_worker(trainer.plan.settings.seed, group.rank, trainer.state.step)


def restore_own(trainer: Trainer, checkpoint: Path) -> None:
    """What this worker had for itself; one that is new takes rank 0's, which fits the weights better than nothing."""
    path = checkpoint / worker_file(trainer.group.rank)
    path = path if path.exists() else checkpoint / worker_file(0)
    own: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    trainer.optimizer.load_state_dict(own["optimizer"])
    with torch.no_grad():
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(own["buffers"][name])


def describe(checkpoint: Checkpoint, workers: int) -> str:
    """What is said when a run goes on."""
    text = f"going on after epoch {checkpoint.epoch}, step {checkpoint.step}"
    if checkpoint.workers != workers:
        text += f"; the state of {checkpoint.workers} workers is carried over to {workers}"
    return text

"""The folder of one run: what it holds, whether it may be gone on with, and that only one run writes to it.

run.json         what the run is (its identity)
metrics.csv      one row an epoch
summary.json     how it was started and how it ended
checkpoint/      latest (a name), epoch-E-step-N/ with a manifest.json that lists and digests its files
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import CheckpointError
from gradwire.state import manifest
from gradwire.state.durable_files import open_own, write_atomic
from gradwire.tools.input_errors import DamagedRunError, InputError

IDENTITY, LATEST, LOCK = "run.json", "latest", ".lock"
METRICS, SUMMARY = "metrics.csv", "summary.json"
NAME = re.compile(r"epoch-\d{5,}-step-\d{8,}")  # of a checkpoint
REMEDY = "Choose another --out, or start anew with --overwrite"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it lies and where the run stood."""

    path: Path
    workers: int
    epoch: int
    step: int


def checkpoint_path(out: Path, epoch: int, step: int) -> Path:
    """Where the checkpoint after `step` steps, `epoch` whole epochs among them, lies."""
    return out / "checkpoint" / f"epoch-{epoch:05d}-step-{step:08d}"


def inspect(
    out: Path, identity: dict[str, Any], resume: bool, overwrite: bool, restarted: bool = False
) -> Checkpoint | None:
    """The checkpoint to go on from, None to start at the beginning, or an InputError. Changes nothing.

    `restarted`: the workers were started again after one had died. They go on with what they have saved, whatever the
    command line said when the run began.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file, a folder was expected")
    if os.path.lexists(out / LOCK):
        os.close(take_lock(out))
    if not (out / IDENTITY).exists():
        refuse_foreign_files(out)
        if resume and not restarted:
            raise InputError(f"--resume: there is no run in {out}. Give its --out, or leave --resume out to begin one")
        return None
    if overwrite and not restarted:
        return None
    if not resume and not restarted:
        raise InputError(f"{out} already holds a run. Go on with it by --resume, or start anew with --overwrite")
    refuse_another_run(out, read_json(out / IDENTITY), identity)
    return find_latest(out)


def refuse_foreign_files(out: Path) -> None:
    """A folder that is no run's must be empty: nobody's files are deleted or mixed with ours."""
    foreign = [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    if foreign:
        raise InputError(
            f"{out} has no {IDENTITY}, so it is not the folder of a gradwire run, and it is not empty "
            f"({', '.join(sorted(foreign)[:3])}): choose another --out"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedRunError(f"{path} is damaged ({error}). {REMEDY}") from error
    if not isinstance(content, dict):
        raise DamagedRunError(f"{path} is damaged (no JSON object). {REMEDY}")
    return content


def refuse_another_run(out: Path, held: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise if the run in `out` is not the one the command line describes."""
    wanted = json.loads(json.dumps(identity))
    others = [key for key in wanted if held.get(key) != wanted[key]]
    if others:
        differences = "; ".join(f"{key} is {held.get(key)!r} there and {wanted[key]!r} here" for key in others)
        raise InputError(f"--resume: {out} holds another run: {differences}. {REMEDY}")


def find_latest(out: Path) -> Checkpoint | None:
    """The newest checkpoint, its files checked against their digests; None when none was written yet."""
    pointer = out / "checkpoint" / LATEST
    if not pointer.exists():
        if saved := sorted(path.name for path in pointer.parent.glob("epoch-*[0-9]")):
            raise DamagedRunError(
                f"{pointer} is missing, though {', '.join(saved)} was saved: write the name of the newest that is "
                f"whole into it (`echo {saved[-1]} > {pointer}`). {REMEDY}"
            )
        if (out / METRICS).exists():
            raise DamagedRunError(f"{pointer.parent} is empty, though {METRICS} came with a checkpoint. {REMEDY}")
        return None
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise DamagedRunError(f"{pointer} is damaged ({error}). {REMEDY}") from error
    if not NAME.fullmatch(name):
        raise DamagedRunError(f"{pointer} is damaged: it names {name[:40]!r}, no checkpoint. {REMEDY}")
    path = pointer.parent / name
    try:
        found = manifest.read(path)
        manifest.verify(path, found)
        state = {key: int(found[key]) for key in ("workers", "epoch", "step")}
    except CheckpointError as error:
        raise DamagedRunError(f"{error}. {REMEDY}") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedRunError(f"checkpoint {path} is damaged ({error!r}). {REMEDY}") from error
    if checkpoint_path(out, state["epoch"], state["step"]) != path:
        raise DamagedRunError(f"checkpoint {path} is damaged: its manifest is that of another. {REMEDY}")
    return Checkpoint(path, **state)


def begin(out: Path, identity: dict[str, Any], checkpoint: Checkpoint | None) -> None:
    """Rank 0, with the lock held: make `out` the folder of this run and clear away what a crash left behind."""
    if checkpoint is None:
        for name in (METRICS, SUMMARY):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        write_atomic(out / IDENTITY, json.dumps(identity, indent=2) + "\n")
    (out / "checkpoint").mkdir(exist_ok=True)
    for leftover in (out / "checkpoint").glob("epoch-*"):
        if checkpoint is None or leftover.name != checkpoint.path.name:
            shutil.rmtree(leftover)


def take_lock(out: Path) -> int:
    """The lock of `out`, until its handle is closed; an InputError where a living process holds it."""
    handle = open_lock(out)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"another run is writing to {out}: wait for it, or choose another --out") from None
    return handle


def open_lock(out: Path) -> int:
    """The lock's file, never written to: nothing is lost where it is not ours."""
    try:
        handle = open_own(out / LOCK)
    except OSError as error:  # a link, a folder, no right to write
        raise InputError(f"{out / LOCK} cannot be used as a lock ({error.strerror}): remove it") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{out / LOCK} is no plain file: remove it, it was a lock")
    return handle


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`; the system lets it go when the process dies, however it dies."""
    out.mkdir(parents=True, exist_ok=True)
    handle = take_lock(out)
    try:
        yield
    finally:
        os.close(handle)

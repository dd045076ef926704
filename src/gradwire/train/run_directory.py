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
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.files import sha256, write_atomic
from gradwire.train.errors import InputError

IDENTITY, LATEST, MANIFEST, LOCK = "run.json", "latest", "manifest.json", ".lock"
RESULTS = ("metrics.csv", "summary.json")
FORMAT = 1
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


def inspect(out: Path, identity: dict[str, Any], resume: bool, overwrite: bool) -> Checkpoint | None:
    """The checkpoint to go on from, None to start at the beginning, or an InputError. Changes nothing.

    `resume` in a folder without a checkpoint starts at the beginning, so that a job that may be stopped at any time can
    always be started by the same command.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file, a folder was expected")
    if is_locked(out):
        raise InputError(f"another run is writing to {out}: wait for it, or choose another --out")
    if not (out / IDENTITY).exists():
        refuse_foreign_files(out)
        return None
    if overwrite:
        return None
    if not resume:
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
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}). {REMEDY}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged (no JSON object). {REMEDY}")
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
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    path = out / "checkpoint" / Path(name).name
    if not (path / MANIFEST).is_file():
        raise InputError(f"checkpoint {path} is damaged: {MANIFEST} is missing. {REMEDY}")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(f"checkpoint {path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    verify_files(path, manifest)
    return Checkpoint(path, manifest["workers"], manifest["epoch"], manifest["step"])


def verify_files(path: Path, manifest: dict[str, Any]) -> None:
    """Raise if a file of the checkpoint is missing, cut or changed."""
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise InputError(f"checkpoint {path} is damaged: {name} is missing. {REMEDY}")
        if file.stat().st_size != entry["bytes"]:
            raise InputError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size:,} bytes, "
                f"{entry['bytes']:,} were written. {REMEDY}"
            )
        if sha256(file) != entry["sha256"]:
            raise InputError(f"checkpoint {path} is damaged: {name} is not what was written (SHA-256). {REMEDY}")


def begin(out: Path, identity: dict[str, Any], checkpoint: Checkpoint | None) -> None:
    """Rank 0, with the lock held: make `out` the folder of this run and clear away what a crash left behind."""
    if checkpoint is None:
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        for name in RESULTS:
            (out / name).unlink(missing_ok=True)
        write_atomic(out / IDENTITY, json.dumps(identity, indent=2) + "\n")
    (out / "checkpoint").mkdir(exist_ok=True)
    for leftover in (out / "checkpoint").glob("epoch-*"):
        if checkpoint is None or leftover.name != checkpoint.path.name:
            shutil.rmtree(leftover)


def is_locked(out: Path) -> bool:
    """Whether a living process holds the lock of `out`."""
    if not (out / LOCK).exists():
        return False
    handle = os.open(out / LOCK, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`; the system lets it go when the process dies, however it dies."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run is writing to {out}: wait for it, or choose another --out") from None
        yield

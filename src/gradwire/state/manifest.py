"""manifest.json: the files of a folder, each with its length and digest, and a digest of the manifest itself.

It finds what a disk or a network has damaged. It is no signature: who may write to the folder can write a new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradwire.errors import CheckpointError
from gradwire.state.durable_files import sha256, sync, write_atomic

NAME, FORMAT = "manifest.json", 1
Entry = dict[str, Any]  # "bytes" and "sha256" of a file


def entry(path: Path) -> Entry:
    """What the manifest says of a file, which is on the disk then."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def files_of(folder: Path) -> dict[str, Path]:
    """All files in a folder and below it but its manifest, by the name the manifest gives them."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in found.items() if name != NAME}


def seal(folder: str | Path, **more: Any) -> None:
    """Write the manifest of all that is in a folder now."""
    folder = Path(folder)
    write(folder, {name: entry(path) for name, path in files_of(folder).items()}, **more)


def write(folder: Path, files: dict[str, Entry], **more: Any) -> None:
    """Write a manifest of files that were digested already."""
    content = {"format": FORMAT, **more, "files": files}
    write_atomic(folder / NAME, json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """The manifest, which is what was written, of the files that are there; a CheckpointError says what is not."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder} is damaged: {NAME} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged (no JSON object)")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder}: {NAME} has format {content.get('format')!r}, this version reads {FORMAT}"
        )
    if content.pop("sha256", None) != _digest(content) or not _lists_files(content):
        raise CheckpointError(f"checkpoint {folder} is damaged: {NAME} is not what was written (SHA-256)")
    listed, there = set(content["files"]), set(files_of(folder))
    if missing := sorted(listed - there):
        raise CheckpointError(f"checkpoint {folder} is damaged: {missing[0]} is missing")
    if foreign := sorted(there - listed):
        raise CheckpointError(f"checkpoint {folder} is damaged: {foreign[0]} is no part of it")
    return content


def _lists_files(content: dict[str, Any]) -> bool:
    files = content.get("files")
    if not isinstance(files, dict):
        return False
    return all(isinstance(one, dict) and one.keys() == {"bytes", "sha256"} for one in files.values())


def verify(folder: Path, manifest: dict[str, Any], names: Iterable[str] | None = None) -> None:
    """Raise if a file, of these or of all, is not what was written."""
    for name in manifest["files"] if names is None else names:
        path, written = folder / name, manifest["files"][name]
        if path.stat().st_size != written["bytes"]:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {path.stat().st_size:,} bytes, "
                f"{written['bytes']:,} were written"
            )
        if sha256(path) != written["sha256"]:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not what was written (SHA-256)")

"""Files that are there whole or not at all, whenever the machine stops; none is written through somebody's link."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write `text` beside `path`, force it to the disk and move it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(open_own(beside, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync(path.parent)


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """A file of our own in a folder that others may write to: made if it is not there, and never a link to another."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()

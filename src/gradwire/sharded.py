"""Save and load of all ranks' state through torch.distributed.checkpoint, also on another number of workers.

r and v are rank-local, so their keys carry the rank: with the same key on two ranks only one rank's residual is kept.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradwire import checkpoint
from gradwire.errors import CheckpointError

if TYPE_CHECKING:
    from gradwire.handle import Wire
    from gradwire.link import Link

HEAD = "gradwire/head"
LARGEST_HEAD = 1 << 26  # bytes: a million parameters have names and counts in it
ALLOWED = {
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    """torch pickles the index of a checkpoint. Only the records it is made of are let through."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name == "PosixPath":  # where it was saved; nobody asks
            return lambda *parts: "/".join(parts)
        if (module, name) not in ALLOWED:
            raise CheckpointError(f"the checkpoint's index names {module}.{name}, which no gradwire checkpoint has")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads a directory that may come from anywhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            data = (self.path / ".metadata").read_bytes()  # type: ignore[operator]
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        except OSError as error:
            raise CheckpointError(f"no checkpoint in {self.path}: {error}") from error
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint in {self.path} is damaged: {error}") from error
        if not isinstance(metadata, Metadata) or HEAD not in metadata.state_dict_metadata:
            raise CheckpointError(f"the checkpoint in {self.path} was not made by gradwire.save")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # anything else would be unpickled by torch
                raise CheckpointError(f"the checkpoint in {self.path} has {key}, which is no tensor")
        for info in metadata.storage_data.values():
            if pathlib.PurePath(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"the checkpoint in {self.path} points to {info.relative_path}, outside of it")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def save(wire: Wire, directory: str | os.PathLike[str]) -> None:
    """Writes the state of all ranks into `directory`. Collective."""
    link = wire._live()
    writer = FileSystemWriter(os.fspath(directory))
    try:
        state_dict_saver.save(sharded_state(wire), storage_writer=writer, process_group=link.group)
    except CheckpointException as error:  # it derives from BaseException
        raise CheckpointError(f"the checkpoint could not be written to {directory}: {error}") from error


def sharded_state(wire: Wire) -> dict[str, Tensor]:
    """This rank's part of a distributed checkpoint, tensors only, under keys that carry the rank."""
    state = wire.state_dict()
    head = {key: value for key, value in state.items() if key not in ("rank", "parameters")}
    head["fields"] = {name: list(fields) for name, fields in state["parameters"].items()}
    flat = {
        _key(state["rank"], name, field): value
        for name, fields in state["parameters"].items()
        for field, value in fields.items()
    }
    return {HEAD: torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8), **flat}


def load(wire: Wire, directory: str | os.PathLike[str], strict: bool = False) -> None:
    """Goes on from `directory`, on as many workers as there are now. Collective."""
    link = wire._live()
    reader = _Reader(os.fspath(directory))
    raw, entries = _prepared(link, lambda: _open(reader))
    _read(reader, {HEAD: raw}, link.group)
    rank, new = dist.get_rank(link.group), link.world_size
    head, wanted = _prepared(link, lambda: _plan(raw, entries, link, rank))
    _read(reader, wanted, link.group)
    states = [_state(head, source, wanted) for source in range(rank, head["world_size"], new)]
    if head["world_size"] != new:
        states = [checkpoint.joined(_state(head, 0, wanted), states, rank, new)]
    wire.load_state_dict(states[0], strict=strict)


T = TypeVar("T")


def _prepared(link: Link, work: Callable[[], T]) -> T:
    """What this rank does alone before a collective; all ranks go on, or all raise."""
    problem: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"the checkpoint is damaged: {error!r}")
    checkpoint.together(link, {"checkpoint": str(problem or "good")}, problem)
    return result


def _open(reader: _Reader) -> tuple[Tensor, dict[str, Any]]:
    """Room for the head, and the index of all tensors."""
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    size = _shape(entries, HEAD)
    if len(size) != 1 or not 0 < size[0] <= LARGEST_HEAD:
        raise CheckpointError(f"the checkpoint's head has the shape {tuple(size)}")
    return torch.empty(size, dtype=torch.uint8), entries


def _plan(raw: Tensor, entries: dict[str, Any], link: Link, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The head, and room for the tensors that this rank wants of it."""
    head = json.loads(bytes(raw.tolist()))
    checkpoint.check({**head, "rank": 0, "parameters": {}})
    # rank 0 gives the shapes to a new rank that starts from zero
    sources = {*range(rank, head["world_size"], link.world_size), 0}
    keys = [
        _key(source, name, field) for source in sources for name, fields in head["fields"].items() for field in fields
    ]
    largest = max((parameter.numel() for parameter in link.parameters.values()), default=0)
    wanted = {}
    for key in keys:
        size = _shape(entries, key)
        if size.numel() > 4 * largest:  # a layer may have shrunk; no allocation follows a stranger's number
            raise CheckpointError(f"the checkpoint's {key} has the shape {tuple(size)}: too large for this model")
        wanted[key] = torch.empty(size, dtype=torch.float32)
    return head, wanted


def _key(rank: int, name: str, field: str) -> str:
    return f"gradwire/rank{rank:05d}/{name}/{field}"


def _shape(entries: dict[str, Any], key: str) -> torch.Size:
    if key not in entries:
        raise CheckpointError(f"the checkpoint has no {key}: it is not whole")
    return torch.Size(entries[key].size)


def _read(reader: _Reader, wanted: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    try:
        state_dict_loader.load(wanted, storage_reader=reader, process_group=group)
    except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
        raise CheckpointError(f"the checkpoint in {reader.path} cannot be read: {error}") from error


def _state(head: dict[str, Any], rank: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One old rank's state out of the keys that were read."""
    return {
        **{key: value for key, value in head.items() if key != "fields"},
        "rank": rank,
        "parameters": {
            name: {field: tensors[_key(rank, name, field)] for field in fields}
            for name, fields in head["fields"].items()
        },
    }

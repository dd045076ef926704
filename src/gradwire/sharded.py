"""Save and load of all ranks' state through torch.distributed.checkpoint, also on another number of workers.

r and v are rank-local, so their keys carry the rank: with the same key on two ranks only one rank's residual is kept.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from typing import TYPE_CHECKING, Any

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

HEAD = "gradwire/head"
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
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def save(wire: Wire, directory: str | os.PathLike[str]) -> None:
    """Writes the state of all ranks into `directory`. Collective."""
    link = wire._live()
    state_dict_saver.save(
        sharded_state(wire), storage_writer=FileSystemWriter(os.fspath(directory)), process_group=link.group
    )


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
    entries = reader.read_metadata().state_dict_metadata
    head = _read_head(reader, entries, link.group)
    rank, old, new = dist.get_rank(link.group), head["world_size"], link.world_size
    sources = range(rank, old, new)
    wanted = {
        _key(source, name, field): torch.empty(_shape(entries, _key(source, name, field)))
        for source in (*sources, 0)  # rank 0 gives the shapes to a new rank that starts from zero
        for name, fields in head["fields"].items()
        for field in fields
    }
    _read(reader, wanted, link.group)
    states = [_state(head, source, wanted) for source in sources]
    if old == new:
        wire.load_state_dict(states[0], strict=strict)
    else:
        wire.load_state_dict(checkpoint.joined(_state(head, 0, wanted), states, rank, new), strict=strict)


def _key(rank: int, name: str, field: str) -> str:
    return f"gradwire/rank{rank:05d}/{name}/{field}"


def _shape(entries: dict[str, Any], key: str) -> torch.Size:
    if key not in entries:
        raise CheckpointError(f"the checkpoint has no {key}: it is not whole")
    size: torch.Size = entries[key].size
    return size


def _read_head(reader: _Reader, entries: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    raw = torch.empty(_shape(entries, HEAD), dtype=torch.uint8)
    _read(reader, {HEAD: raw}, group)
    try:
        head = json.loads(bytes(raw.tolist()))
        checkpoint.check({**head, "rank": 0, "parameters": {}})
        fields = head["fields"]
        assert all(isinstance(name, str) and isinstance(names, list) for name, names in fields.items())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the checkpoint's head is damaged: {error!r}") from error
    return dict(head)


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

"""Save and load of all ranks' state through torch.distributed.checkpoint, also on another number of workers.

r and v are rank-local, so their keys carry the rank: with the same key on two ranks only one rank's residual is kept.
A manifest digests every file; a rank checks the files it is about to read, and between them they read all.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Collection
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradwire.errors import CheckpointError
from gradwire.exchange.courier import gathered
from gradwire.state import checkpoint, manifest

if TYPE_CHECKING:
    from gradwire.adapters.local_wire import LocalWire
    from gradwire.adapters.outer_loop import OuterLoop
    from gradwire.adapters.reducer import Reducer
    from gradwire.adapters.wire import Wire

HEAD = "gradwire/head"
INDEX = ".metadata"
OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|manifest\.json")
ENTRY = struct.Struct("<q32s")  # of a rank's file: bytes and SHA-256; nothing else can come from another rank
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

    def __init__(self, folder: Path) -> None:
        super().__init__(os.fspath(folder))
        self.folder = folder
        self.manifest: dict[str, Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = _MetadataUnpickler(io.BytesIO((self.folder / INDEX).read_bytes())).load()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint in {self.folder} is damaged: {error}") from error
        if not isinstance(metadata, Metadata) or HEAD not in metadata.state_dict_metadata:
            raise CheckpointError(f"the checkpoint in {self.folder} was not made by gradwire.save")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # anything else would be unpickled by torch
                raise CheckpointError(f"the checkpoint in {self.folder} has {key}, which is no tensor")
        for info in metadata.storage_data.values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"the checkpoint in {self.folder} points to {info.relative_path}, outside of it")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_manifest(self) -> None:
        """What there is, or why there is nothing to go by."""
        if not (self.folder / INDEX).is_file():
            raise CheckpointError(f"no checkpoint in {self.folder}: {INDEX} is missing")
        if not (self.folder / manifest.NAME).is_file():
            raise CheckpointError(
                f"the checkpoint in {self.folder} has no {manifest.NAME}: saving was cut short, or a gradwire saved it "
                "that kept no digests, and nothing tells whether it is what was written. If you know that it is: "
                f"python -c \"from gradwire.state import manifest; manifest.seal('{self.folder}')\""
            )
        self.manifest = manifest.read(self.folder)
        manifest.verify(self.folder, self.manifest, [INDEX])

    def verify(self, metadata: Metadata, keys: Collection[str]) -> None:
        """Check the files that these keys lie in against their digests."""
        found = {info.relative_path for index, info in metadata.storage_data.items() if index.fqn in keys}
        manifest.verify(self.folder, self.manifest, sorted(found))


def save(wire: Wire | LocalWire, directory: str | os.PathLike[str]) -> None:
    """Writes the state of all ranks into `directory`, which is this checkpoint's own. Collective."""
    reducer, folder = wire._live(), Path(directory)
    rank = dist.get_rank(reducer.group)
    _prepared(reducer, lambda: _clear(folder) if rank == 0 else None)
    try:
        writer = FileSystemWriter(os.fspath(directory))
        state_dict_saver.save(sharded_state(wire), storage_writer=writer, process_group=reducer.group)
    except CheckpointException as error:  # it derives from BaseException
        raise CheckpointError(f"the checkpoint could not be written to {directory}: {error}") from error
    mine = _prepared(reducer, lambda: _entry(folder / _file(rank)))  # on a disk that may be this rank's own
    entries = gathered(mine, reducer.group, reducer.device)
    _prepared(reducer, lambda: _seal(folder, entries) if rank == 0 else None)


def _clear(folder: Path) -> None:
    """An earlier checkpoint goes, its manifest first; a folder with anything else in it is refused."""
    files = manifest.files_of(folder) if folder.is_dir() else {}
    if foreign := [name for name in files if not OURS.fullmatch(name)]:
        raise CheckpointError(
            f"{folder} holds {foreign[0]}, which is no part of a checkpoint: give it a folder of its own"
        )
    for path in (folder / manifest.NAME, *files.values()):
        path.unlink(missing_ok=True)


def _file(rank: int) -> str:
    """Where torch writes what a rank has."""
    return f"__{rank}_0.distcp"


def _entry(path: Path) -> bytes:
    """A file's line of the manifest, of one length on all ranks; a rank that holds nothing may have written none."""
    if not path.is_file():
        return ENTRY.pack(-1, bytes(32))
    found = manifest.entry(path)
    return ENTRY.pack(found["bytes"], bytes.fromhex(found["sha256"]))


def _seal(folder: Path, entries: list[bytes]) -> None:
    files = {INDEX: manifest.entry(folder / INDEX)}
    for rank, packed in enumerate(entries):
        n_bytes, digest = ENTRY.unpack(packed)
        if n_bytes >= 0:
            files[_file(rank)] = {"bytes": n_bytes, "sha256": digest.hex()}
    manifest.write(folder, files)


def sharded_state(wire: Wire | LocalWire) -> dict[str, Tensor]:
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


def load(wire: Wire | LocalWire, directory: str | os.PathLike[str], strict: bool = False) -> None:
    """Goes on from `directory`, on as many workers as there are now. Collective."""
    reducer = wire._live()
    reader = _Reader(Path(directory))
    raw, metadata = _prepared(reducer, lambda: _open(reader))
    _read(reader, {HEAD: raw}, reducer.group)
    rank, new = dist.get_rank(reducer.group), reducer.world_size
    head, wanted = _prepared(reducer, lambda: _plan(reader, raw, metadata, reducer, rank))
    _read(reader, wanted, reducer.group)
    wire.load_state_dict(_prepared(reducer, lambda: _ours(head, wanted, rank, new)), strict=strict)


T = TypeVar("T")


def _prepared(reducer: Reducer | OuterLoop, work: Callable[[], T]) -> T:
    """What this rank does alone before a collective; all ranks go on, or all raise."""
    problem: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    except OSError as error:
        problem = CheckpointError(f"the checkpoint cannot be read or written: {error}")
    except Exception as error:
        problem = CheckpointError(f"the checkpoint is damaged: {error!r}")
    checkpoint.all_or_none(reducer, problem)
    return result


def _open(reader: _Reader) -> tuple[Tensor, Metadata]:
    """Room for the head, and the index of all tensors."""
    reader.read_manifest()
    metadata = reader.read_metadata()
    size = _shape(metadata, HEAD)
    if len(size) != 1 or not 0 < size[0] <= LARGEST_HEAD:
        raise CheckpointError(f"the checkpoint's head has the shape {tuple(size)}")
    reader.verify(metadata, [HEAD])
    return torch.empty(size, dtype=torch.uint8), metadata


def _plan(
    reader: _Reader, raw: Tensor, metadata: Metadata, reducer: Reducer | OuterLoop, rank: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The head, and room for the tensors that this rank wants of it."""
    head = json.loads(bytes(raw.tolist()))
    checkpoint.check({**head, "rank": 0, "parameters": {}})
    # rank 0 gives the shapes to a new rank that starts from zero
    sources = {*range(rank, head["world_size"], reducer.world_size), 0}
    largest = max((parameter.numel() for parameter in reducer.parameters.values()), default=0)
    wanted = {}
    for key in (_key(source, name, field) for source in sources for name, fs in head["fields"].items() for field in fs):
        size = _shape(metadata, key)
        if size.numel() > 4 * largest:  # a layer may have shrunk; no allocation follows a stranger's number
            raise CheckpointError(f"the checkpoint's {key} has the shape {tuple(size)}: too large for this model")
        wanted[key] = torch.empty(size, dtype=torch.float32)
    reader.verify(metadata, wanted)
    return head, wanted


def _key(rank: int, name: str, field: str) -> str:
    return f"gradwire/rank{rank:05d}/{name}/{field}"


def _shape(metadata: Metadata, key: str) -> torch.Size:
    entry: Any = metadata.state_dict_metadata.get(key)
    if entry is None:
        raise CheckpointError(f"the checkpoint has no {key}: it is not whole")
    if [chunk.sizes for chunk in entry.chunks] != [entry.size]:  # what no chunk covers would be whatever memory holds
        raise CheckpointError(f"the checkpoint has only parts of {key}: it is not whole")
    return torch.Size(entry.size)


def _read(reader: _Reader, wanted: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    try:
        state_dict_loader.load(wanted, storage_reader=reader, process_group=group)
    except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
        raise CheckpointError(f"the checkpoint in {reader.path} cannot be read: {error}") from error


def _ours(head: dict[str, Any], tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Any]:
    """This rank's state, out of as many old ranks' as go on in it."""
    states = [_state(head, source, tensors) for source in range(rank, head["world_size"], world_size)]
    if head["world_size"] == world_size:
        return states[0]
    return checkpoint.merged(_state(head, 0, tensors), states, rank, world_size)


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

"""State that is damaged, foreign, hostile or in part: refused with a reason by every rank, and nothing changes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
import scenes
from gradwire import VGC, Dense
from gradwire.errors import CheckpointError
from gradwire.state import distributed_checkpoint as sharded
from gradwire.state import manifest


def refused(case):
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    list(scenes.train(model, range(3), scenes.sgd(model)))
    good = wire.state_dict()
    bad = {**good, "parameters": {name: dict(fields) for name, fields in good["parameters"].items()}}
    rank = dist.get_rank()
    first = bad["parameters"]["0.weight"]
    if case == "foreign":
        bad = {"model": {}}
    elif case == "other model":
        bad["parameters"] = {"there": {"residual": torch.zeros(3), "variance": torch.zeros(3)}}
    elif case == "shape":
        first["residual"] = torch.zeros(3)
    elif case == "nan":
        first["variance"] = first["variance"].clone().fill_(float("nan"))
    elif case == "dtype":
        first["residual"] = first["residual"].double()
    elif case == "rank":
        bad["rank"] = (rank + 1) % 2
    elif case == "format":
        bad["format"] = 99
    elif case == "one rank":
        bad = bad if rank == 1 else good
        bad["step"] = 3 + rank
    elif case == "counts":
        bad["passed"] = {"0.weight": -4}
    try:
        wire.load_state_dict(bad)
        message = "no error"
    except CheckpointError as error:
        message = str(error)
    same = wire.state_dict()
    unchanged = all(
        torch.equal(same["parameters"][n]["residual"], f["residual"]) for n, f in good["parameters"].items()
    )
    prints = list(scenes.train(model, range(3, 5), scenes.sgd(model)))  # and it goes on
    return message, unchanged, prints


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("foreign", "not a gradwire state"),
        ("other model", "another model"),
        ("shape", "expected (24, 12)"),
        ("nan", "not finite"),
        ("dtype", "float32"),
        ("rank", "gradwire.load"),
        ("format", "format 99"),
        ("one rank", "another rank"),
        ("counts", "passed"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(spawn, case, text):
    results = spawn(2, refused, case)
    for message, unchanged, prints in results:
        assert text in message
        assert unchanged
        assert prints == results[0][2]


def load_from(directory):
    wire = gradwire.attach(scenes.ddp(scenes.net()), VGC(alpha=2.0))
    try:
        gradwire.load(wire, directory)
    except CheckpointError as error:
        return str(error)
    return "no error"


class Harm:
    def __reduce__(self):
        return print, ("unpickled!",)


def test_a_damaged_directory_is_refused_and_nothing_is_unpickled(spawn, tmp_path, capfd):
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    metadata = tmp_path / "wire" / ".metadata"
    whole = metadata.read_bytes()
    assert all("no checkpoint" in message for message in spawn(2, load_from, tmp_path / "nothing"))
    metadata.write_bytes(pickle.dumps(Harm()))
    manifest.seal(metadata.parent)
    assert all("names builtins.print" in message for message in spawn(2, load_from, tmp_path / "wire"))
    assert "unpickled" not in capfd.readouterr().out
    metadata.write_bytes(whole[: len(whole) // 2])
    manifest.seal(metadata.parent)
    assert all("damaged" in message for message in spawn(2, load_from, tmp_path / "wire"))
    metadata.write_bytes(whole)
    data = next(Path(tmp_path / "wire").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    manifest.seal(metadata.parent)
    assert all("cannot be read" in message for message in spawn(2, load_from, tmp_path / "wire"))


def hostile(directory, case):
    """The index of a checkpoint, changed by someone who means harm."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    key = next(k for k in metadata.state_dict_metadata if k.endswith("0.weight/residual"))
    if case == "huge":
        entry = metadata.state_dict_metadata[key]
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])
    elif case == "size":
        metadata.state_dict_metadata[key].size = "abc"
    elif case == "no chunks":
        metadata.state_dict_metadata[key].chunks = []
    elif case == "path":
        for info in metadata.storage_data.values():
            info.relative_path = f"../{directory.name}/{info.relative_path}"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest.seal(directory)


@pytest.mark.parametrize(
    ("case", "text"),
    [("huge", "too large"), ("size", "only parts"), ("no chunks", "only parts"), ("path", "outside of it")],
)
def test_a_hostile_index_is_refused(spawn, tmp_path, case, text):
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    hostile(tmp_path / "wire", case)
    assert all(text in message for message in spawn(2, load_from, tmp_path / "wire"))


def save_with_head(directory, changes):
    """A checkpoint whose every digest is right, and whose head says something else."""

    def changed(wire):
        state = sharded_state(wire)
        head = {**json.loads(bytes(state[sharded.HEAD].tolist())), **changes}
        return {**state, sharded.HEAD: torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)}

    sharded_state, sharded.sharded_state = sharded.sharded_state, changed
    try:
        scenes.train_and_save(directory, 3)
    finally:
        sharded.sharded_state = sharded_state


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 1 << 40}, "out of range"),
        ({"world_size": 1 << 20}, "it is not whole"),
        ({"fields": {"0.weight": 5}}, "damaged"),
        ({"powers": {"residual": 1}}, "variance"),
    ],
)
def test_a_hostile_head_is_refused(spawn, tmp_path, changes, text):
    """No work follows a number in it, and every rank hears of it, also where states of several ranks are joined."""
    spawn(2, save_with_head, tmp_path / "wire", changes)
    for workers in (2, 3):
        assert all(text in message for message in spawn(workers, load_from, tmp_path / "wire"))


FLIPS = 120


def load_with_flips(directory):
    """One bit of one file at a time, every file in turn, and back again; what the ranks said of each."""
    wire = gradwire.attach(scenes.ddp(scenes.net()), VGC(alpha=2.0))
    draws = torch.Generator().manual_seed(4)
    files = [(path, 8 * path.stat().st_size) for path in sorted(directory.iterdir())]
    said = []
    for number in range(FLIPS):
        path, bits = files[number % len(files)]
        place = int(torch.randint(bits, (), generator=draws))
        dist.barrier()
        if dist.get_rank() == 0:
            flip(path, place)
        dist.barrier()
        try:
            gradwire.load(wire, directory)
            said.append((path.name, "no error"))
        except CheckpointError as error:
            said.append((path.name, str(error)))
        dist.barrier()
        if dist.get_rank() == 0:
            flip(path, place)
        dist.barrier()
    gradwire.load(wire, directory)
    return said


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_no_flipped_bit_of_any_file_is_loaded(spawn, tmp_path):
    """One rank reads the damaged file and names it, the others hear of it. (75 of 120 in .distcp files were loaded.)"""
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    first, second = spawn(2, load_with_flips, tmp_path / "wire")
    assert {name for name, _ in first} == {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}
    for (name, ours), (_, others) in zip(first, second, strict=True):
        assert "no error" not in (ours, others)
        assert name in ours or name in others
        assert "another rank" in ours or name in ours


def list_too(folder, name):
    """One more file in the manifest, a real one outside of the folder."""
    (folder.parent / "there").write_text("")
    files = manifest.read(folder)["files"]
    manifest.write(folder, {**files, name: manifest.entry(folder / name)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), "no checkpoint"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.seal"),
        (lambda folder: (folder / "more").write_text(""), "more is no part of it"),
        (lambda folder: Path(os.fsdecode(bytes(folder) + b"/\xff")).write_text(""), "is no part of it"),
        (lambda folder: list_too(folder, "../there"), "../there is missing"),
        (lambda folder: list_too(folder, "/etc/passwd"), "/etc/passwd is missing"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged (no JSON"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
            "manifest.json is not what was written",
        ),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    ],
)
def test_a_checkpoint_with_other_files_than_its_own_is_refused(spawn, tmp_path, change, text):
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    change(tmp_path / "wire")
    assert all(text in message for message in spawn(2, load_from, tmp_path / "wire"))


def test_a_checkpoint_of_before_there_were_digests_is_sealed_by_who_trusts_it(spawn, tmp_path):
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    (tmp_path / "wire" / "manifest.json").unlink()
    message = spawn(2, load_from, tmp_path / "wire")[0]
    command = message[message.index('"') + 1 : message.rindex('"')]
    subprocess.run([sys.executable, "-c", command], check=True)
    assert spawn(2, load_from, tmp_path / "wire") == ["no error", "no error"]


def save_into(directory, compressor):
    try:
        model = scenes.ddp(scenes.net())
        wire = gradwire.attach(model, compressor)
        list(scenes.train(model, range(3), scenes.sgd(model)))
        gradwire.save(wire, directory)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_ranks_that_hold_nothing_are_saved_too(spawn, tmp_path):
    assert spawn(3, save_into, tmp_path / "wire", Dense()) == ["no error"] * 3
    assert spawn(2, load_from, tmp_path / "wire") == ["no error"] * 2


def test_a_checkpoint_has_a_folder_of_its_own_and_leaves_nothing_of_the_one_before(spawn, tmp_path):
    assert spawn(3, save_into, tmp_path / "wire", VGC(alpha=2.0)) == ["no error"] * 3
    assert spawn(2, save_into, tmp_path / "wire", VGC(alpha=2.0)) == ["no error"] * 2
    assert not (tmp_path / "wire" / "__2_0.distcp").exists()
    assert spawn(2, load_from, tmp_path / "wire") == ["no error"] * 2
    (tmp_path / "wire" / "model.pt").write_text("")
    messages = spawn(2, save_into, tmp_path / "wire", VGC(alpha=2.0))
    assert "holds model.pt" in messages[0]
    assert "another rank" in messages[1]
    assert (tmp_path / "wire" / ".metadata").exists()  # nothing was removed


def load_from_one(directory):
    return load_from(directory if dist.get_rank() == 0 else directory / "missing")


def test_a_checkpoint_that_one_rank_cannot_see_is_refused_by_all(spawn, tmp_path):
    spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    messages = spawn(2, load_from_one, tmp_path / "wire")
    assert "another rank" in messages[0]
    assert "no checkpoint" in messages[1]


def test_reshard_refuses_a_part_of_the_states(spawn, tmp_path):
    states = spawn(2, scenes.train_and_save, tmp_path / "wire", 3)
    with pytest.raises(CheckpointError, match="all ranks in order"):
        gradwire.reshard(states[::-1], 3)
    with pytest.raises(CheckpointError, match="all ranks in order"):
        gradwire.reshard(states[:1], 3)
    for bad in ([], 2), (states, 0), (states, -1):
        with pytest.raises(CheckpointError, match="at least 1 worker"):
            gradwire.reshard(*bad)

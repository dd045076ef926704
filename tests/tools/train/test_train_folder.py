"""The folder of a run: gone on with only when it is the same run, whole, and nobody else's."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import CheckpointError
from gradwire.state import manifest
from gradwire.state.durable_files import write_atomic
from gradwire.tools.input_errors import InputError
from gradwire.tools.train import run_directory
from gradwire.tools.train.run_checkpoint import publish
from gradwire.tools.train.run_directory import begin, checkpoint_path, inspect, locked

IDENTITY: dict[str, Any] = {"task": "digits", "seed": 3, "learning_rate": {"base": 0.001}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of two workers after epoch 1, step 22."""
    out = tmp_path / "run"
    with locked(out):
        begin(out, IDENTITY, None)
    write_checkpoint(out, epoch=1, step=22)
    return out


def write_checkpoint(out: Path, epoch: int, step: int) -> Path:
    final = checkpoint_path(out, epoch, step)
    unfinished = final.with_name(final.name + ".unfinished")
    (unfinished / "wire").mkdir(parents=True)
    (unfinished / "training.pt").write_bytes(bytes(range(256)))
    (unfinished / "wire" / ".metadata").write_bytes(b"index")
    manifest.seal(unfinished, workers=2, epoch=epoch, step=step)
    publish(unfinished, final)
    return final


def test_goes_on_from_the_latest(run: Path) -> None:
    final = write_checkpoint(run, epoch=2, step=44)
    found = inspect(run, IDENTITY, resume=True, overwrite=False)
    assert found == run_directory.Checkpoint(final, workers=2, epoch=2, step=44)
    assert [path.name for path in (run / "checkpoint").iterdir() if path.is_dir()] == [final.name], "one is kept"


def test_a_run_is_not_overwritten_by_accident(run: Path) -> None:
    with pytest.raises(InputError, match=r"already holds a run.*--resume.*--overwrite"):
        inspect(run, IDENTITY, resume=False, overwrite=False)
    assert inspect(run, IDENTITY, resume=False, overwrite=True) is None


def test_another_run_is_refused_and_the_difference_named(run: Path) -> None:
    other = {**IDENTITY, "seed": 4, "task": "text"}
    with pytest.raises(InputError, match=r"another run: task is 'digits' there and 'text' here; seed is 3 there and 4"):
        inspect(run, other, resume=True, overwrite=False)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, resume: bool, overwrite: bool) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(InputError, match=r"no run\.json.*not empty \(checkpoint\)"):
        inspect(tmp_path, IDENTITY, resume=resume, overwrite=overwrite)


def test_resume_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    """A name that was typed wrong would be the beginning of a new run."""
    for out in (tmp_path / "new", tmp_path):
        with pytest.raises(InputError, match=r"there is no run in .*leave --resume out to begin one"):
            inspect(out, IDENTITY, resume=True, overwrite=False)
        assert inspect(out, IDENTITY, resume=True, overwrite=False, restarted=True) is None  # it died before it began


def test_resume_before_the_first_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    with locked(tmp_path):
        begin(tmp_path, IDENTITY, None)
    assert inspect(tmp_path, IDENTITY, resume=True, overwrite=False) is None


def test_a_restart_goes_on_whatever_the_run_began_with(run: Path) -> None:
    for resume, overwrite in ((False, False), (False, True), (True, False)):
        found = inspect(run, IDENTITY, resume=resume, overwrite=overwrite, restarted=True)
        assert found is not None
        assert found.step == 22


def test_a_lost_pointer_is_no_empty_folder(run: Path) -> None:
    (run / "checkpoint" / "latest").unlink()
    damage_and_expect(run, r"latest is missing, though epoch-00001-step-00000022 was saved")
    assert checkpoint_path(run, 1, 22).exists()
    assert inspect(run, IDENTITY, resume=False, overwrite=True) is None


def test_a_lost_checkpoint_is_no_beginning(run: Path) -> None:
    """A folder on another disk, which is not there today: what was measured stays."""
    (run / "metrics.csv").write_text("epoch\n1\n")
    shutil.rmtree(run / "checkpoint")
    damage_and_expect(run, r"checkpoint is empty, though metrics\.csv came with a checkpoint")
    (run / "checkpoint").symlink_to(run / "elsewhere")
    damage_and_expect(run, "is empty")
    assert inspect(run, IDENTITY, resume=False, overwrite=True) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../../x", b"epoch-00001-step-00000022.unfinished", b"a\0b"])
def test_a_damaged_pointer_is_found(run: Path, content: bytes) -> None:
    (run / "checkpoint" / "latest").write_bytes(content)
    damage_and_expect(run, "latest is damaged")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[]", b'{"format": 1}', b'{"format": 1, "files": []}'])
def test_a_damaged_manifest_is_found(run: Path, content: bytes) -> None:
    (checkpoint_path(run, 1, 22) / "manifest.json").write_bytes(content)
    damage_and_expect(run, "manifest.json")


def test_no_flipped_bit_of_a_manifest_is_taken(run: Path) -> None:
    path = checkpoint_path(run, 1, 22) / "manifest.json"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        damage_and_expect(run, "manifest.json|missing|no part of it")


@pytest.mark.parametrize("without", ["workers", "epoch", "step"])
def test_a_sealed_manifest_that_says_too_little_is_damaged(run: Path, without: str) -> None:
    facts = {"workers": 2, "epoch": 1, "step": 22}
    manifest.seal(checkpoint_path(run, 1, 22), **{key: value for key, value in facts.items() if key != without})
    damage_and_expect(run, f"is damaged.*{without}")
    manifest.seal(checkpoint_path(run, 1, 22), **{**facts, without: "many"})
    damage_and_expect(run, "is damaged")


def test_the_lock_is_never_somebody_elses_file(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(precious)
    damage_and_expect(run, r"\.lock cannot be used as a lock")
    with pytest.raises(InputError, match="cannot be used as a lock"), locked(run):
        pass
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    damage_and_expect(run, r"\.lock is no plain file")
    (run / ".lock").unlink()
    os.link(precious, run / ".lock")
    with locked(run):
        pass
    assert precious.read_text() == "mine"


def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".run.json.{os.getpid()}").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomic(tmp_path / "run.json", "ours")
    assert precious.read_text() == "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="is a file"):
        inspect(tmp_path / "out", IDENTITY, resume=True, overwrite=False)


def damage_and_expect(run: Path, message: str) -> None:
    """Bad input to the command line; where it is the checkpoint, a CheckpointError to a program."""
    with pytest.raises(InputError, match=message) as caught:
        inspect(run, IDENTITY, resume=True, overwrite=False)
    assert isinstance(caught.value, CheckpointError) or "lock" in message


def test_damage_is_found(run: Path) -> None:
    folder = checkpoint_path(run, 1, 22)
    training, index = folder / "training.pt", folder / "wire" / ".metadata"
    content = training.read_bytes()
    training.write_bytes(content[:-1])
    damage_and_expect(run, r"training\.pt has 255 bytes, 256 were written")
    training.write_bytes(content[:-1] + b"\x00")
    damage_and_expect(run, r"training\.pt is not what was written")
    training.write_bytes(content)
    index.unlink()
    damage_and_expect(run, r"wire/\.metadata is missing")
    index.write_bytes(b"index")
    listing = folder / "manifest.json"
    text = listing.read_text()
    listing.write_text(text[:50])
    damage_and_expect(run, r"manifest\.json is damaged")
    listing.write_text(json.dumps({**json.loads(text), "format": 99}))
    damage_and_expect(run, r"has format 99, this version reads 1")
    listing.unlink()
    damage_and_expect(run, r"manifest\.json is missing")


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_identity_is_found(run: Path, content: str) -> None:
    (run / "run.json").write_text(content)
    damage_and_expect(run, r"run\.json is damaged")
    assert inspect(run, IDENTITY, resume=False, overwrite=True) is None


def test_a_crash_while_saving_leaves_the_old_checkpoint(run: Path) -> None:
    unfinished = checkpoint_path(run, 2, 44).with_name("epoch-00002-step-00000044.unfinished")
    unfinished.mkdir()
    unnamed = checkpoint_path(run, 2, 44)  # renamed, but the machine stopped before `latest` named it
    unnamed.mkdir()
    found = inspect(run, IDENTITY, resume=True, overwrite=False)
    assert found is not None
    assert found.step == 22
    begin(run, IDENTITY, found)
    assert not unfinished.exists()
    assert not unnamed.exists()
    assert found.path.exists()


def test_only_one_run_writes(run: Path) -> None:
    with (run / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing"):
            inspect(run, IDENTITY, resume=True, overwrite=False)
        with pytest.raises(InputError, match="another run is writing"), locked(run):
            pass
    with locked(run):
        pass

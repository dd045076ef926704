"""The folder of a run: gone on with only when it is the same run, whole, and nobody else's."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from gradwire.train import run_directory
from gradwire.train.checkpoint import publish, write_manifest
from gradwire.train.errors import InputError
from gradwire.train.run_directory import begin, checkpoint_path, inspect, locked
from gradwire.train.standing import Standing

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
    write_manifest(unfinished, Standing(epoch=epoch, step=step), workers=2)
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


def test_resume_without_anything_yet_starts_at_the_beginning(tmp_path: Path) -> None:
    assert inspect(tmp_path / "new", IDENTITY, resume=True, overwrite=False) is None
    assert inspect(tmp_path, IDENTITY, resume=True, overwrite=False) is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="is a file"):
        inspect(tmp_path / "out", IDENTITY, resume=True, overwrite=False)


def damage_and_expect(run: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        inspect(run, IDENTITY, resume=True, overwrite=False)


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
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:50])
    damage_and_expect(run, r"manifest\.json is damaged")
    manifest.write_text(json.dumps({**json.loads(text), "format": 99}))
    damage_and_expect(run, r"has format 99, this version reads 1")
    manifest.unlink()
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

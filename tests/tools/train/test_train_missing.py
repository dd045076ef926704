"""Without scikit-learn, which is not one of gradwire's dependencies: a line that says what to install, exit 2."""

from pathlib import Path

import pytest
from commands import run_command

HIDE_SKLEARN = "import sys\nsys.modules['sklearn'] = None\n"  # an import of it then fails as if it were not there
MESSAGE = "gradwire: error: task digits needs scikit-learn, which is missing: pip install scikit-learn\n"


@pytest.mark.parametrize("command", ["demo", "train --task digits --workers 2"])
def test_digits_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_SKLEARN)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    result = run_command(*command.split(), PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (2, "", MESSAGE)
    assert not list(empty.iterdir()), "no folder of a run is left behind"

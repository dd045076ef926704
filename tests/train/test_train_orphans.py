"""Workers whose launcher was killed end by themselves, and the run goes on."""

from pathlib import Path

import pytest
from commands import run_command
from test_train_resume import EPOCHS, options, read_columns, run_and_kill

pytestmark = pytest.mark.slow


def test_a_run_goes_on_after_its_launcher_was_killed(tmp_path: Path) -> None:
    """The workers must notice that they are alone, and end: nobody else may write while the run goes on."""
    out = tmp_path / "out"
    run_and_kill(options("dense", out), out, launcher_only=True)
    result = run_command(*options("dense", out), "--resume")
    assert result.returncode == 0, result.stderr
    rows = read_columns(out, ("epoch", "step"))
    assert rows == [[str(epoch), str(44 * epoch)] for epoch in range(1, EPOCHS + 1)]

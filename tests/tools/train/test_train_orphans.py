"""Workers whose launcher was killed end by themselves, and the run goes on bit for bit."""

from pathlib import Path

import pytest
from test_train_resume import go_on_and_compare, options, run_and_kill

pytestmark = pytest.mark.slow


def test_dense_goes_on_bit_for_bit_after_its_launcher_was_killed(tmp_path: Path) -> None:
    """The workers must notice that they are alone, and end: nobody else may write while the run goes on."""
    broken = tmp_path / "broken"
    run_and_kill(options("dense", broken), broken, launcher_only=True)
    go_on_and_compare("dense", broken, tmp_path / "whole")

"""A small text to train on."""

from pathlib import Path

import pytest


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """12 kB with something to learn in it."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(f"{i} times {i} is {i * i}\n".encode() for i in range(600)))
    return path

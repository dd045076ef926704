"""Tables and numbers as text files: rows that are appended as they come, and whole files as text."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Table = list[dict[str, Any]]


def read(path: Path) -> Table:
    """All rows; none of a file that is not there."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict[str, str]) -> None:
    """Streamed, so that what is there can be looked at while the run goes on."""
    head = "" if path.exists() else csv_text(list(row), [])
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(head)
        csv.DictWriter(file, list(row), lineterminator="\n").writerow(row)


def keep(path: Path, rows: Table) -> None:
    """Of all rows of a file these alone, where it has others."""
    if len(rows) < len(read(path)):
        path.unlink()
        for row in rows:
            append(path, row)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A head and a line a row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_text(content: Any) -> str:
    """A number that is not finite becomes null, which every JSON reader takes."""
    return json.dumps(_finite(content), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

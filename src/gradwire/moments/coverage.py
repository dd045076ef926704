"""Step 1, moments: the report of which parameter has an exact moment, which an estimate, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """kind: exact, by activation, groups, signs, step, not seen yet, frozen."""

    name: str
    kind: str
    why: str


def table(rows: Sequence[Row]) -> str:
    """The report as text: one line a parameter, then the number of parameters of each kind."""
    names = max((len(row.name) for row in rows), default=0)
    kinds = max((len(row.kind) for row in rows), default=0)
    lines = [f"{row.name:<{names}}  {row.kind:<{kinds}}  {row.why}".rstrip() for row in rows]
    counts = Counter(row.kind for row in rows)
    lines.append(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return "\n".join(lines)

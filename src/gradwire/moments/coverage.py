"""Step 1, moments: the report of which parameter has an exact moment, which an estimate, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.moments.ledger import Ledger


class Row(NamedTuple):
    """kind: exact, by activation, groups, signs, step, not seen yet, frozen."""

    name: str
    kind: str
    why: str


def report(ledgers: Iterable[Ledger]) -> list[Row]:
    """One row a parameter, as its last backward left it."""
    return [row_of(ledger) for ledger in ledgers]


def row_of(ledger: Ledger) -> Row:
    if not ledger.param.requires_grad:
        return Row(ledger.name, "frozen", "requires_grad is False")
    why = ledger.never if ledger.kind == "not seen yet" and ledger.never else ledger.why
    return Row(ledger.name, ledger.kind, why)


def table(rows: Sequence[Row]) -> str:
    """The report as text: one line a parameter, then the number of parameters of each kind."""
    names = max((len(row.name) for row in rows), default=0)
    kinds = max((len(row.kind) for row in rows), default=0)
    lines = [f"{row.name:<{names}}  {row.kind:<{kinds}}  {row.why}".rstrip() for row in rows]
    counts = Counter(row.kind for row in rows)
    lines.append(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return "\n".join(lines)

"""Step 1, moments: the report of which parameter has an exact moment, which an estimate, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.moments.account import Account


class Row(NamedTuple):
    """kind: exact, by activation, groups, signs, step, not seen yet, frozen."""

    name: str
    kind: str
    why: str


def report(accounts: Iterable[Account]) -> list[Row]:
    """One row a parameter, as its last backward left it."""
    return [row_of(account) for account in accounts]


def row_of(account: Account) -> Row:
    if not account.param.requires_grad:
        return Row(account.name, "frozen", "requires_grad is False")
    why = account.never if account.kind == "not seen yet" and account.never else account.why
    return Row(account.name, account.kind, why)


def table(rows: Sequence[Row]) -> str:
    """The report as text: one line a parameter, then the number of parameters of each kind."""
    names = max((len(row.name) for row in rows), default=0)
    kinds = max((len(row.kind) for row in rows), default=0)
    lines = [f"{row.name:<{names}}  {row.kind:<{kinds}}  {row.why}".rstrip() for row in rows]
    counts = Counter(row.kind for row in rows)
    lines.append(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return "\n".join(lines)

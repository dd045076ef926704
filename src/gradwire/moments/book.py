"""Step 1, moments: what a parameter's ledger needs to know of its recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gradwire.moments.capturing import Capturing
    from gradwire.moments.ledger import Ledger


class Book(Protocol):
    """A recorder, as its ledgers see it."""

    capturing: Capturing | None
    paused: frozenset[str]
    strict: bool
    estimator: str
    same_samples: bool
    ran_backward: bool

    @property
    def passes(self) -> int: ...

    @property
    def open_samples(self) -> int | None: ...

    def hear(self, ledger: Ledger) -> None: ...
